"""A family whose layers differ, in this file alone: windows with two key-value heads, and full attention with a wide one.

It is planned, checked and run, over whole sequences and over kept keys, and compared with plain PyTorch in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mosaic
from mosaic.errors import UsageError
from mosaic.models import Model
from mosaic.models.architecture import Architecture, Attention, FeedForward, Layer
from mosaic.models.huggingface import NAMES
from mosaic.models.kept_keys import key_row
from mosaic.models.parts import KEPT, MIXED, NO_HEAD, Commit
from mosaic.models.parts.ringed import NEAR, Ringed
from mosaic.models.phase import Phase
from mosaic.models.rotary import Rotary
from mosaic.planner.check import check_plan
from mosaic.runtime.steps import StepRequest

RULE = Commit(score="confidence", rule="dynamic")
VOCABULARY, HIDDEN, WINDOW, EPS = 61, 24, 3, 1e-6


def architecture(*, block: int = 0, order: int = 1) -> Architecture:
    """Layers that alternate, in either order: heads of 8 with a window, heads of 12 whose values are their keys."""
    near = Attention(
        heads=4, kv_heads=2, head_size=8, rotary=Rotary(theta=100.0, dim=8), window=WINDOW, head_norms=True
    )
    far = Attention(heads=3, kv_heads=1, head_size=12, rotary=Rotary(theta=5000.0, dim=4), keys_as_values=True)
    sizes = FeedForward(size=40), FeedForward(size=16, experts=4, experts_per_token=2)
    pair = tuple(Layer(attention=own, feed_forward=fed) for own, fed in zip((near, far), sizes, strict=True))
    return Architecture(
        hidden=HIDDEN, vocabulary=VOCABULARY, stack=pair[::order] * 2, norm_eps=EPS, mask_token_id=VOCABULARY - 1, block=block,
        dtype="float32", names=EXPERTS,
    )  # fmt: skip


_EXPERT = "model.layers.{layer}.mlp.experts.{experts}."
EXPERTS = replace(
    NAMES, gate=_EXPERT + "gate_proj.weight", up=_EXPERT + "up_proj.weight", down=_EXPERT + "down_proj.weight",
    dense="model.layers.{layer}.mlp.{part}_proj.weight",
)  # fmt: skip


def toy(arch: Architecture) -> Model:
    return Model(name="toy", family="toy", config={}, architecture=arch)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turned(x_TNH: Tensor, rotary: Rotary) -> Tensor:
    half = rotary.dim // 2
    frequencies = rotary.theta ** (-torch.arange(0, rotary.dim, 2).double() / rotary.dim)
    angle = torch.arange(len(x_TNH)).double()[:, None, None] * frequencies
    a, b, rest = x_TNH.split([half, half, x_TNH.shape[-1] - rotary.dim], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def plain(arch: Architecture, given: Mapping[str, Tensor], ids: Tensor, ends: Tensor | None = None) -> Tensor:
    """Logits of one sequence, in float64."""
    w = {name: tensor.double() for name, tensor in given.items()}
    x, place = w[NAMES.embedding][ids], torch.arange(len(ids))
    for number, layer in enumerate(arch.stack):
        own, stem = layer.attention, f"model.layers.{number}."
        h = normed(x, w[NAMES.attention_norm.format(layer=number)])
        q, k = ((h @ w[f"{stem}self_attn.{name}_proj.weight"].T).view(len(ids), -1, own.head_size) for name in "qk")
        v = k if own.keys_as_values else (h @ w[f"{stem}self_attn.v_proj.weight"].T).view_as(k)
        if own.head_norms:
            q, k = (normed(part, w[f"{stem}self_attn.{name}_norm.weight"]) for name, part in (("q", q), ("k", k)))
        q, k = turned(q, own.rotary), turned(k, own.rotary)
        if arch.keys:
            k, v = (part.to(getattr(torch, arch.keys)).double() for part in (k, v))
        k, v = (part.repeat_interleave(own.heads // own.kv_heads, dim=1) for part in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, k) / math.sqrt(own.head_size)
        hidden = torch.zeros(len(ids), len(ids), dtype=torch.bool)
        if own.window:
            hidden |= (place[:, None] - place).abs() >= own.window
        if ends is not None:
            hidden |= ends[:, None] <= place
        elif arch.block:
            hidden |= place[:, None] // arch.block < place // arch.block
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + torch.einsum("nts,snh->tnh", weights, v).flatten(1) @ w[f"{stem}self_attn.o_proj.weight"].T
        x = x + fed(layer.feed_forward, w, stem, normed(x, w[NAMES.ffn_norm.format(layer=number)]))
    return normed(x, w[NAMES.final_norm]) @ w[NAMES.head].T


def fed(layer: FeedForward, w: Mapping[str, Tensor], stem: str, h: Tensor) -> Tensor:
    def gated(h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T

    if not layer.experts:
        return gated(h, *(w[f"{stem}mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
    scores = (h @ w[f"{stem}mlp.gate.weight"].T).softmax(-1)
    best, chosen = scores.topk(layer.experts_per_token)
    stacks = [w[f"{stem}mlp.experts.{{0:{layer.experts}}}.{part}_proj.weight"] for part in ("gate", "up", "down")]
    rows = [
        sum(s * gated(row, *(stack[e] for stack in stacks)) for s, e in zip(best[i], chosen[i], strict=True))
        for i, row in enumerate(h)
    ]
    return torch.stack([torch.as_tensor(row) for row in rows])


def weights_of(model: Any) -> dict[str, Tensor]:
    """The random weights, large enough that attention and experts matter."""
    for name, tensor in model.weights().items():
        if not name.startswith("=") and tensor.dim() > 1:
            tensor.mul_(12.0)
    return {name: tensor.clone() for name, tensor in model.weights().items() if not name.startswith("=")}


def test_layers_of_two_widths_have_places_of_their_own_in_a_row() -> None:
    row, spans = key_row(architecture()), []
    for layer, place in zip(architecture().stack, row.places, strict=True):
        width = 2 * layer.attention.kv_width
        assert row.columns % width == 0
        spans.append(range(place * width, (place + 1) * width))
    taken = [column for span in spans for column in span]
    assert len(taken) == len(set(taken)) == 2 * (32 + 24) and max(taken) < row.columns


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("way", ["together", "queries"])
def test_a_step_of_a_family_whose_layers_differ_equals_plain_pytorch(way: str, block: int) -> None:
    ids = torch.randint(0, VOCABULARY - 1, (13,), generator=torch.Generator().manual_seed(3))
    arch = architecture(block=block)
    with mosaic.compile(toy(arch), device="cpu", config={"attention": way}) as model:
        given = weights_of(model)
        found = model(ids, logits_for=torch.arange(13)).logits.clone()
        plan = model.plan([13])
    assert not check_plan(plan.document) and plan.config["attention"] == way
    torch.testing.assert_close(found.double(), plain(arch, given, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.some
@pytest.mark.parametrize(("order", "keys"), [(1, ""), (-1, ""), (1, "bfloat16")])
@pytest.mark.parametrize("config", [{"attention": "together"}, {"attention": "queries"}, {"products": "fused"}])
def test_steps_over_kept_keys_of_two_widths_equal_plain_pytorch(config: dict[str, str], order: int, keys: str) -> None:
    arch = replace(architecture(block=4, order=order), keys=keys)
    ids = torch.randint(0, VOCABULARY - 1, (13,), generator=torch.Generator().manual_seed(5))
    first, then = Phase(cache=KEPT, head=NO_HEAD), Phase(cache=KEPT, commit=RULE)
    with mosaic.compile(toy(arch), device="cpu") as model:
        given, sequence, found = weights_of(model), model.open_sequence(), []
        sequence.reserve(13)
        kept = {"sequence": sequence}
        none = ids[:0]
        model.step([StepRequest(phase=first, token_ids=ids[:8], rows=none, current=none, key_len=8, **kept)])
        for start, end in ((8, 12), (12, 13)):
            rows = torch.arange(end - start)
            asked = StepRequest(
                phase=then, token_ids=ids[start:end], start=start, rows=rows, current=ids[start:end], key_len=end,
                quota=1, threshold=0.9, **kept,
            )  # fmt: skip
            (result,) = model.step([asked], config=config)
            assert not check_plan(result.plan.document) and config.items() <= result.plan.config.items()
            (state,) = [buffer for buffer in result.plan.records.buffers if buffer.kind == "state"]
            assert state.dtype == (keys or "float32")
            found.append((result.token.clone(), result.score.clone()))
    expected = plain(arch, given, ids)[8:]
    tokens, scores = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert torch.equal(tokens, expected.argmax(-1))
    torch.testing.assert_close(scores.double(), expected.softmax(-1).amax(-1), rtol=1e-4, atol=1e-4)


def test_one_step_mixes_rows_that_see_by_several_rules() -> None:
    """A causal request, one by blocks, one both ways, and one of a causal prefix and a canvas that sees all."""
    arch, phase = architecture(block=4), Phase(cache=MIXED, commit=RULE)
    draw, place = torch.Generator().manual_seed(9), torch.arange(10)
    rules = [place + 1, (place // 4 + 1) * 4, torch.full((10,), 10), torch.where(place < 6, place + 1, 10)]
    with mosaic.compile(toy(arch), device="cpu") as model:
        given, asked = weights_of(model), []
        for ends in rules:
            sequence, ids = model.open_sequence(), torch.randint(0, VOCABULARY - 1, (10,), generator=draw)
            sequence.reserve(10)
            asked.append(
                StepRequest(
                    phase=phase, token_ids=ids, rows=place, current=ids, key_len=10, sequence=sequence, quota=1,
                    threshold=0.9, values={"ends": ends.to(torch.int32)},
                )
            )  # fmt: skip
        results = model.step(asked)
        assert not check_plan(results[0].plan.document)
        with pytest.raises(UsageError, match="for each token of the window, how many keys it sees"):
            model.step([replace(asked[0], values={})])
    for request, ends, result in zip(asked, rules, results, strict=True):
        expected = plain(arch, given, request.token_ids, ends)
        assert torch.equal(result.token, expected.argmax(-1))
        torch.testing.assert_close(result.score.double(), expected.softmax(-1).amax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.some
@pytest.mark.parametrize("config", [{"attention": "together"}, {"attention": "queries"}, {"products": "fused"}])
def test_layers_with_a_window_keep_a_ring_of_rows_however_long_the_context_is(config: dict[str, str]) -> None:
    """Two requests, as block diffusion asks for them: blocks are denoised, begun early and asked for again, then written."""
    arch, length, block = architecture(block=4), 44, 4
    cache = Ringed(ring=WINDOW - 1 + 2 * block)
    fill, phase = Phase(cache=cache, head=NO_HEAD), Phase(cache=cache, commit=RULE)
    draw = torch.Generator().manual_seed(11)
    texts = [torch.randint(0, VOCABULARY - 1, (length,), generator=draw) for _ in range(2)]

    with mosaic.compile(toy(arch), device="cpu") as model:
        given, hole = weights_of(model), model.open_rows(NEAR)
        hole.reserve(4)
        between, owners = model.open_rows(NEAR), []
        between.reserve(1)
        hole.close()
        for _ in texts:
            far, near = model.open_rows(fill.cache.kept), model.open_rows(NEAR)
            far.reserve(length), near.reserve(cache.ring)
            owners.append((far, near))
        assert len(near.extents) == 1 and len(owners[0][1].extents) == 2

        def ask(phase: Phase, number: int, start: int, ids: Tensor) -> StepRequest:
            (far, near), rows = owners[number], torch.arange(0 if phase is fill else len(ids))
            return StepRequest(
                phase=phase, token_ids=ids, start=start, rows=rows, current=ids[rows], key_len=start + len(ids), sequence=far,
                states={NEAR: near}, quota=1, threshold=0.9,
            )  # fmt: skip

        def step(start: int, count: int, known: int) -> list[Any]:
            """Positions beyond `known` hold something that is not their last token."""
            parts = [text[start : start + count].clone() for text in texts]
            for part in parts:
                part[max(known - start, 0) :] = torch.randint(
                    0, VOCABULARY, (max(start + count - known, 0),), generator=draw
                )
            results = model.step([ask(phase, number, start, part) for number, part in enumerate(parts)], config=config)
            assert not check_plan(results[0].plan.document) and config.items() <= results[0].plan.config.items()
            return [
                (plain(arch, given, torch.cat([text[:start], part]))[start:], result)
                for text, part, result in zip(texts, parts, results, strict=True)
            ]

        for start in (0, 8):
            model.step([ask(fill, number, start, text[start : start + 8]) for number, text in enumerate(texts)])
        for start in range(16, length - block, block):
            found = [*step(start, block, start), *step(start, 2 * block, start), *step(start, block, start + 2)]
            found += step(start, 2 * block, start + block)
            for expected, result in found:
                assert torch.equal(result.token, expected.argmax(-1))
                torch.testing.assert_close(result.score.double(), expected.softmax(-1).amax(-1), rtol=1e-4, atol=1e-4)
        assert model.state_rows == {"kv_far": 2 * length, "kv_near": 2 * cache.ring + 1}
        with pytest.raises(UsageError, match="reaches 11 of them in layers with a window, and the request has 10 rows"):
            model.step([ask(fill, 0, 20, texts[0][20:29])])


def test_a_generation_keeps_rings_and_equals_plain_pytorch() -> None:
    """Several times the window, prefilled by chunks: each step commits the position that is surest."""
    arch = architecture(block=4)
    prompt = torch.randint(0, VOCABULARY - 1, (18,), generator=torch.Generator().manual_seed(13))
    with mosaic.compile(toy(arch), device="cpu") as model:
        given = weights_of(model)
        taken: list[dict[str, int]] = []
        (found,) = model.generate(
            prompt, gen_length=14, steps=4, block_length=4, remasking="low_confidence_static", stop_at_eos=False,
            on_step=lambda step: taken.append(dict(model.state_rows)),
        )  # fmt: skip
    assert taken[0] == {"kv_far": 32, "kv_near": WINDOW - 1 + 8}
    canvas, masked = torch.cat([prompt, torch.full((14,), VOCABULARY - 1)]), torch.arange(32) >= 18
    for end in range(20, 33, 4):
        while len(rows := masked[:end].nonzero()[:, 0]):
            score, token = plain(arch, given, canvas[:end])[rows].softmax(-1).max(-1)
            canvas[rows[score.argmax()]], masked[rows[score.argmax()]] = token[score.argmax()], False
    assert torch.equal(found.token_ids, canvas[18:])
