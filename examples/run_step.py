"""Load a small LLaDA checkpoint in the Hugging Face layout, plan it, run one denoising step in exactly the planned bytes.

Run it with `make demo`, or with any checkpoint directory of a family that `mosaic models` lists:
`python examples/run_step.py path/to/checkpoint`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import mosaic
from mosaic.units import format_bytes

TOKENS = 2048
SMALL = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8,
    "mlp_hidden_size": 768, "vocab_size": 8192, "embedding_size": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "mask_token_id": 8191, "torch_dtype": "float32",
}  # fmt: skip


def small_checkpoint(directory: Path) -> Path:
    """Write a randomly initialised LLaDA of 11 million parameters: config.json and model.safetensors."""
    with mosaic.compile(SMALL, seed=0) as model:
        model.save(directory)
    return directory


def run(checkpoint: Path) -> None:
    """Plan, run, and set planned bytes beside those the operating system counts."""
    with mosaic.compile(checkpoint) as model:
        token_ids = torch.randint(0, model.mask_token_id, (TOKENS,), generator=torch.Generator().manual_seed(0))
        token_ids[TOKENS // 2 :] = model.mask_token_id
        plan = model.plan(TOKENS, masked=TOKENS // 2)
        plan.check()
        print(f"\n{checkpoint.name}: {TOKENS:,} tokens, {TOKENS // 2:,} masked, planned and checked")
        print(
            f"  peak of the workspace {format_bytes(plan.peak_bytes)}, its lower bound {format_bytes(plan.lower_bound_bytes)}"
        )
        chunks = ", ".join(f"{knob} {value}" for knob, value in plan.config.items() if value is not None)
        print(f"  chunks: {chunks}")
        step = model(token_ids)
        print(
            f"\nstep done: {len(step.rows):,} masked rows; the surest token is {int(step.token_ids[step.confidence.argmax()])}"
        )
        print(f"with probability {float(step.confidence.max()):.4f}\n")
        print(model.memory())


def main() -> None:
    """Run on a given checkpoint, or on a small one made for the occasion."""
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as directory:
        run(small_checkpoint(Path(directory) / "small-llada"))


if __name__ == "__main__":
    try:
        main()
    except mosaic.MosaicError as error:
        print(f"run_step: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
