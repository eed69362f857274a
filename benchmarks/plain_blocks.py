"""Blocks of block diffusion behind long prefixes, in plain PyTorch: the baseline of `benchmarks.sparse`.

One sequence, over a cache that is allocated once, in which each pass writes the window's own keys: SDAR's published loop
(`benchmarks.loops`) copies all keys in each pass. Grouped heads are left to PyTorch's attention, its flash backend on a card.
Weights and keys are random.
"""

from __future__ import annotations

import time

import torch

from benchmarks.bench.baselines import Transformer
from benchmarks.bench.meters import synchronise
from benchmarks.bench.torch_engine import fill
from benchmarks.engines.sdpa import using
from benchmarks.loops import Cache, PlainModel, sdar_decides
from mosaic.decoding import GenerationConfig
from mosaic.decoding.llada import schedule
from mosaic.models import Model

__all__ = ["plain_step_ms"]


@torch.no_grad()
def plain_step_ms(model: Model, *, prefix: int, steps: int, blocks: int, cuda: bool) -> list[float]:
    """Milliseconds of the steps of some blocks; the last of a block is with the pass that stores its keys."""
    arch, where = model.architecture, torch.device("cuda" if cuda else "cpu")
    network = Transformer(arch, device=where)
    fill(network.tensors, model, 3)
    plain, block = PlainModel(network, grouped=True), arch.block
    sizes = (1, arch.attention.kv_heads, prefix + block, arch.attention.head_size)
    cache: Cache = [
        (torch.randn(sizes, dtype=network.dtype, device=where), torch.randn(sizes, dtype=network.dtype, device=where))
        for _ in range(arch.layers)
    ]
    config = GenerationConfig(remasking="low_confidence_static", steps=steps)
    found = list[float]()
    with using("flash" if cuda else None):
        for _ in range(1 + blocks):  # the first is not counted
            ids = torch.full((1, block), arch.mask_token_id, device=where)
            open_ = torch.ones(block, dtype=torch.bool, device=where)
            for quota in schedule(block, steps):
                began = time.perf_counter()
                hidden, _ = plain.layers(ids, prefix, cache, replace=True)
                sdar_decides(plain, hidden, ids[0], open_, quota, config)
                if not bool(open_.any()):
                    plain.layers(ids, prefix, cache, replace=True)
                synchronise(cuda)
                found.append(1e3 * (time.perf_counter() - began))
    return found[steps:]
