"""Config values beyond the released checkpoints, against stock transformers classes in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stock_models import stock_logits, stock_model
from test_rotary_scaling import CONFIGS, LONG, all_logits, enlarge, sequences

import mosaic


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llada", {"include_qkv_bias": True, "multi_query_attention": True, "n_kv_heads": None, "embedding_size": 112}),
        ("dream", {"tie_word_embeddings": True}),
        ("llada2", {"num_experts_per_tok": 1, "norm_topk_prob": False, "use_qkv_bias": True}),
        ("llada2", {"use_qk_norm": False, "n_group": 1, "num_shared_experts": 2, "partial_rotary_factor": 0.25}),
    ],
    ids=str,
)
def test_what_a_config_asks_for_is_computed(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIGS[family] | change
    turning = {"partial_rotary_factor": config.get("partial_rotary_factor", 0.5)} if family == "llada2" else {}
    rope = {"rope_type": "default", "rope_theta": 10000.0, **turning}
    ids = [one for one in sequences() if len(one) <= LONG]
    with mosaic.compile(config, debug="poison") as model:
        enlarge(model)
        arch = model.architecture
        stock = stock_model(model, tmp_path, rope_parameters=rope)
        for one, logits in zip(ids, all_logits(model, ids), strict=True):
            expected = stock_logits(stock, one, arch.block)
            difference = logits[1:] - expected[:-1] if arch.shifted else logits - expected
            assert float(difference.abs().max()) <= 1e-5 * float(expected.abs().max())
