"""Two schemes of weights in this file alone: 8 bits an element, and 4 bits, two to a byte, both with a scale for each row.

Its operators, parts and encoding are the user's. A model in it is planned, checked and run, its experts and embedding plain, and
gives what plain PyTorch gives with the weights that the bits stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mosaic
from mosaic import Implementation, Operator
from mosaic.devices import load_device
from mosaic.errors import UsageError
from mosaic.models import load
from mosaic.planner.check import check_plan, unverified_operators
from mosaic.planner.planner import Planner
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.schemes.scheme import Part, Scheme, part_of

SIZES = {
    "model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 48, "vocab_size": 64,
    "embedding_size": 64, "mask_token_id": 63, "include_qkv_bias": True, "torch_dtype": "float32",
}  # fmt: skip


# --- the scheme -------------------------------------------------------------------------------------------------------


def linear(*, x: Tensor, codes: Tensor, scale: Tensor, y: Tensor, bias: Tensor | None = None, **_: Any) -> None:
    torch.mm(x, codes.to(x.dtype).T, out=y)
    y.mul_(scale)
    if bias is not None:
        y.add_(bias)


def linear_add(*, x: Tensor, codes: Tensor, scale: Tensor, y: Tensor, **_: Any) -> None:
    y.add_((x @ codes.to(x.dtype).T) * scale)


def on_cpu(kernel: Callable[..., None]) -> tuple[Implementation, ...]:
    return (Implementation(backend="cpu", kernel=kernel),)


def encode(weight: Tensor) -> Mapping[str, Tensor]:
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return {"codes": (weight.float() / scale[:, None]).round().to(torch.int8), "scale": scale}


EIGHT_BITS = Scheme(
    name="8 bits by rows",
    parts=(Part(name="codes", dtype="int8"), Part(name="scale", dtype="float32", columns=0)),
    linear=Operator(
        name="eight_bit_linear", operands="x:a[T, I] codes:int8[O, I] scale:f32[O] bias?:a[O] -> y:a[T, O]", flops="2*x*O",
        rate="gemm", rate_columns="O", implementations=on_cpu(linear),
    ),
    linear_add=Operator(
        name="eight_bit_linear_add", operands="x:a[T, I] codes:int8[O, I] scale:f32[O] y!:a[T, O] ->", flops="2*x*O",
        rate="gemm", rate_columns="O", implementations=on_cpu(linear_add),
    ),
    encode=encode,
)  # fmt: skip


def unpacked(codes: Tensor) -> Tensor:
    """Two columns of [-8, 8) from each byte."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8) - 8


def packed_linear(*, codes: Tensor, **given: Any) -> None:
    linear(codes=unpacked(codes), **given)


def packed_linear_add(*, codes: Tensor, **given: Any) -> None:
    linear_add(codes=unpacked(codes), **given)


def packed(weight: Tensor) -> Mapping[str, Tensor]:
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 7
    codes = ((weight.float() / scale[:, None]).round() + 8).to(torch.uint8)
    return {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scale": scale}


FOUR_BITS = Scheme(
    name="4 bits by rows",
    parts=(Part(name="codes", dtype="uint8", columns=2), Part(name="scale", dtype="float32", columns=0)),
    linear=Operator(
        name="four_bit_linear", operands="x:a[T, 2*I] codes:u8[O, I] scale:f32[O] bias?:a[O] -> y:a[T, O]", flops="2*x*O",
        rate="gemm", rate_columns="O", implementations=on_cpu(packed_linear),
    ),
    linear_add=Operator(
        name="four_bit_linear_add", operands="x:a[T, 2*I] codes:u8[O, I] scale:f32[O] y!:a[T, O] ->", flops="2*x*O",
        rate="gemm", rate_columns="O", implementations=on_cpu(packed_linear_add),
    ),
    encode=packed,
)  # fmt: skip


# --- what it does -----------------------------------------------------------------------------------------------------


def decoded(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain weights that the bits stand for."""
    found = {name: view.clone() for name, view in views.items() if not part_of(name)[1]}
    for name, view in views.items():
        source, part = part_of(name)
        if part == "codes":
            codes = view if view.dtype == torch.int8 else unpacked(view)
            found[source] = codes.float() * views[f"{source}|scale"][:, None]
    return found


def by_its_name(name: str, tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() > 1 else 0.1) + (tensor.dim() == 1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with mosaic.compile(SIZES, device="cpu") as model:
        for name, tensor in model.weights().items():
            if not name.startswith("="):
                tensor.copy_(by_its_name(name, tensor))
        model.save(tmp_path)
    return tmp_path


IDS = torch.randint(0, 63, (17,), generator=torch.Generator().manual_seed(1))


@pytest.mark.some
@pytest.mark.parametrize(("scheme", "steps"), [(EIGHT_BITS, 127), (FOUR_BITS, 7)], ids=["8 bits", "4 bits"])
@pytest.mark.parametrize("config", [{"attention": "together"}, {"attention": "heads", "heads": 1}, {"stream": "all"}])
def test_a_model_in_a_scheme_equals_plain_pytorch_with_these_weights(
    checkpoint: Path, config: Any, scheme: Scheme, steps: int
) -> None:
    options = {"device": "cpu", "config": config, "host_budget": "1GiB"}
    with mosaic.compile(load(checkpoint).with_scheme(scheme), **options) as model:
        views, found = decoded(model.weights()), model(IDS, logits_for=torch.arange(17))
        logits, plan = found.logits.clone(), found.plan
    assert not check_plan(plan.document) and config.items() <= plan.config.items()
    assert {scheme.linear.name, scheme.linear_add.name} <= set(unverified_operators(plan.document))
    with mosaic.compile(checkpoint, device="cpu") as plain:
        whole = {name: tensor.clone() for name, tensor in plain.weights().items()}
        for name, tensor in plain.weights().items():
            assert name.startswith("=") or (whole[name] - views[name]).abs().max() <= whole[name].abs().max() / (
                1.96 * steps
            )
            tensor.copy_(views[name])
        torch.testing.assert_close(logits, plain(IDS, logits_for=torch.arange(17)).logits, rtol=1e-4, atol=1e-4)


def test_a_plan_has_the_bytes_of_eight_bits_and_of_four() -> None:
    plain, coded, halved = (
        Planner(model, device=load_device("cpu")).plan(mosaic.Request(seq_lens=(64,)))
        for model in (load(SIZES), load(SIZES).with_scheme(EIGHT_BITS), load(SIZES).with_scheme(FOUR_BITS))
    )
    projections = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    rows = 2 * (32 + 16 + 16 + 32 + 48 + 48 + 32)
    own = [
        sum(prod(b.shape) * ITEMSIZE[b.dtype] for b in plan.records.buffers if b.kind == "weight")
        for plan in (plain, coded, halved)
    ]
    assert own[0] - own[1] == 3 * projections - 4 * rows and own[1] - own[2] == projections // 2


def test_random_weights_are_those_of_the_plain_model_and_are_not_saved(tmp_path: Path) -> None:
    with mosaic.compile(SIZES, device="cpu") as plain:
        whole = {name: tensor.clone() for name, tensor in plain.weights().items()}
    with mosaic.compile(load(SIZES).with_scheme(EIGHT_BITS), device="cpu") as model:
        for name, tensor in decoded(model.weights()).items():
            assert (whole[name] - tensor).abs().max() <= whole[name].abs().max() / 250, name
        with pytest.raises(UsageError, match="'8 bits by rows' stores the model's matrices"):
            model.save(tmp_path)
