"""Greedy low-confidence decoding in plain PyTorch, for watching a training; `mosaic generate` does it for real."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attention import masked
from model import DECODE_BLOCK, Transformer, rotary_tables
from torch import Tensor

from benchmarks.quality.evaluation import gen_length
from benchmarks.quality.items import Item
from benchmarks.quality.scoring import Score, score
from benchmarks.quality.vocabulary import EOS, MASK, PAD, vocabulary

__all__ = ["decode", "evaluate"]


@torch.no_grad()
def decode(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    dtype: torch.dtype,
    block: int = DECODE_BLOCK,
) -> list[list[int]]:
    """Fill `num_tokens` masks after every prompt, a token a step, surest first, block after block.

    The bidirectional model sees the whole canvas; the block-diffusion one whole blocks of positions, the prompt's last
    partial block included. Stops when every answer is complete up to its first [EOS].
    """
    device, causal = model.embedding.device, model.sizes.block
    ends = [-(-(len(ids) + num_tokens) // block) * block if causal else len(ids) + num_tokens for ids in prompts]
    size = -(-max(ends) // 8) * 8
    canvas = torch.full((len(prompts), size), PAD)
    for index, ids in enumerate(prompts):
        canvas[index, : len(ids)] = torch.tensor(ids)
        canvas[index, len(ids) : ends[index]] = MASK
    canvas = canvas.to(device)
    position = torch.arange(size, device=device)
    starts = torch.tensor([0 if causal else len(ids) for ids in prompts], device=device)
    prompt_ends = torch.tensor([len(ids) for ids in prompts], device=device)[:, None]
    number = (position - starts[:, None]).clamp(min=0) // block  # of each position's block [B, N]
    if causal:
        visible = position[:, None] // causal >= position // causal
    else:
        visible = (position < torch.tensor(ends, device=device)[:, None])[:, None, None].expand(-1, 1, size, -1)
    cos, sin = rotary_tables(model.sizes, position.repeat(len(prompts)))
    for _ in range(max(ends)):
        mask = canvas == MASK
        ended = _first((canvas == EOS) & (position >= prompt_ends)) < _first(mask)
        hidden = mask & ~ended
        if not hidden.any():
            break
        first = torch.where(hidden, number, size).amin(1, keepdim=True)
        active = hidden & (number == first)
        x = model.hidden(canvas.flatten(), cos, sin, masked(len(prompts), visible), dtype, eager=True)
        rows = active.flatten().nonzero()[:, 0]
        logits = model.logits(x[rows])
        logits[:, [PAD, MASK]] = -torch.inf
        best, token = logits.softmax(-1).max(-1)
        surest = torch.full(canvas.shape, -1.0, device=device)
        surest.view(-1)[rows] = best
        proposed = canvas.clone()
        proposed.view(-1)[rows] = token
        where = surest.argmax(1, keepdim=True)
        chosen = torch.zeros_like(active).scatter_(1, where, active.any(1, keepdim=True))
        canvas = torch.where(chosen, proposed, canvas)
    answers = [canvas[i, len(ids) : ends[i]].tolist() for i, ids in enumerate(prompts)]
    return [answer[: answer.index(EOS)] if EOS in answer else answer for answer in answers]


def _first(found: Tensor) -> Tensor:
    """Position of the first True of every row [B, 1]; the row's length where there is none."""
    size = found.shape[1]
    return torch.where(found, torch.arange(size, device=found.device), size).amin(1, keepdim=True)


def evaluate(model: Transformer, items: Sequence[Item], *, dtype: torch.dtype, batch_tokens: int) -> list[Score]:
    """Decode and score items, those of one task and length together."""
    encode = vocabulary().encode
    found: list[Score] = []
    groups: dict[tuple[str, int], list[Item]] = {}
    for item in items:
        groups.setdefault((item.task, item.length), []).append(item)
    for (task, length), members in groups.items():
        step = max(1, batch_tokens // max(length, 256))
        for start in range(0, len(members), step):
            part = members[start : start + step]
            answers = decode(model, [encode(item.prompt) for item in part], gen_length(task), dtype=dtype)
            found += [score(item, vocabulary().decode(ids)) for item, ids in zip(part, answers, strict=True)]
    return found
