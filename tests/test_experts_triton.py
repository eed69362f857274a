"""Products of experts and their router in Triton: every tile, by address and by descriptor, and a row alone as among others."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32, Case, assert_within, gamma, randn, rounding, router_case, strided, unit
from test_triton_kernels import INTERPRETED, grouped_linear, run

from mosaic.kernels.cuda import grouped_linear as experts_kernel
from mosaic.kernels.cuda import moe_route as router_kernel
from mosaic.kernels.cuda.shared.launching import capability

DEVICE = "cpu" if INTERPRETED else "cuda"
INNER = 256 if INTERPRETED else 2048
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

# rows of each expert: for every tile some without rows, with one, a last tile of few, one more than a tile, all rows
COUNTS = [
    (0, 1, 0, 5, 2, 0, 1, 17, 0),
    (1, 0, 0, 0, 0, 0, 0, 0),
    (0, 33, 16, 17, 64, 65, 0, 1),
    (0, 0, 70, 0),
    (300, 0, 129, 64, 65, 128, 1, 256),
    (0, 500, 0),
]


@pytest.fixture(params=[False, True], ids=["by address", "by descriptor"])
def described(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tiles are loaded by descriptor, which the interpreter does when told so and Hopper where operands allow it."""
    if request.param and not INTERPRETED and capability(torch.empty(1, device="cuda")) // 10 != 9:
        pytest.skip("the GPU is no Hopper")
    for kernel in (experts_kernel, router_kernel):
        decide = (lambda x, weight: True) if INTERPRETED else kernel.has_descriptors

        def as_asked(x: Tensor, weight: Tensor, decide: Callable[[Tensor, Tensor], bool] = decide) -> bool:
            assert decide(x, weight) or not request.param
            return bool(request.param)

        monkeypatch.setattr(kernel, "has_descriptors", as_asked)
    return bool(request.param)


# descriptors are for operands of 16 bits
ways = pytest.mark.parametrize(
    ("dtype", "described"), [(F32, False), (BF16, False), (BF16, True)], indirect=["described"], ids=str
)


def operand(*shape: int, dtype: torch.dtype, seed: int = 0, apart: int = 0, scale: float = 1.0) -> Tensor:
    """Random numbers, and for the interpreter such that 64 products add up exactly: NumPy's order depends on a product's shape.

    They are whole, and of every 128 the first half is larger by 2^`apart`. So sums are rounded in the order of the kernel's steps.
    """
    if not INTERPRETED:
        return randn(*shape, dtype=dtype, seed=seed, scale=scale)
    whole = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    sizes = 2.0 ** torch.tensor([apart, 0]).repeat_interleave(64).repeat(shape[-1] // 128)
    return (whole * sizes * scale).to(dtype)


def test_counts_are_of_every_tile() -> None:
    for described, tiles in ((False, 2), (True, 3)):
        chosen = {
            experts_kernel.tile_of(torch.empty(sum(counts), 1, dtype=BF16), len(counts), described) for counts in COUNTS
        }
        assert len(chosen) == tiles


@pytest.mark.some
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_products_of_experts(counts: tuple[int, ...], described: bool) -> None:
    case, verify = grouped_linear((counts, 136, 150), BF16, aligned=True)
    verify(run(case, DEVICE))


@pytest.mark.some
@ways
def test_a_row_of_an_expert_is_the_same_alone_and_among_others(dtype: torch.dtype, described: bool) -> None:
    """Whichever tile the rows of the batch choose. Inputs cancel, so what is left are the roundings of sums, in their order."""
    counts, outer = (130, 0, 97, 280), 150
    half = operand(sum(counts), INNER // 2, dtype=dtype, apart=20)
    half_weight = operand(4, outer, INNER // 2, dtype=dtype, seed=1)
    x, weight = torch.cat([half, -half], dim=1), torch.cat([half_weight, half_weight], dim=2)
    starts = [sum(counts[:expert]) for expert in range(len(counts))]
    tiles = set()

    def products(numbers: Sequence[Sequence[int]]) -> Tensor:
        """Of the rows of these numbers within each expert."""
        chosen = [start + number for start, own in zip(starts, numbers, strict=True) for number in own]
        offsets = torch.tensor([sum(len(own) for own in numbers[:expert]) for expert in range(len(counts) + 1)])
        tiles.add(experts_kernel.tile_of(x[chosen], len(counts), described))
        case = Case("grouped_linear", {"x": x[chosen], "weight": weight, "offsets": offsets})
        case.outputs = {"y": torch.empty(len(chosen), outer, dtype=dtype)}
        return run(case, DEVICE)["y"]

    everything = products([range(count) for count in counts])
    few = [(0, 129), (), (), (5,)], [(), (), (96,), ()], [range(123, 130), (), range(7), range(270, 280)]
    for numbers in (*few, [range(20, 80), (), (7,), range(250, 280)]):
        chosen = [start + number for start, own in zip(starts, numbers, strict=True) for number in own]
        assert torch.equal(products(numbers), everything[chosen])
    assert len(tiles) == (3 if described else 2)


@pytest.mark.some
@pytest.mark.parametrize("shape", [(70, 72, 100), (1, 64, 256), (130, 200, 64)], ids=str)
def test_router(shape: tuple[int, int, int], described: bool) -> None:
    rows, hidden, experts = shape
    attrs = {"top_k": 6, "normalize": True, "groups": 4, "top_groups": 2, "scale": 2.5}
    case = router_case(rows, hidden, experts, BF16, bias=True, **attrs)
    case.operands["x"] = strided(case.operands["x"], 8, 8)
    found, expected = run(case, DEVICE), case.reference()
    assert torch.equal(found["experts"], expected["experts"])
    logits = (case.operands["x"].double() @ case.operands["weight"].double().T).abs().amax()
    relative = gamma(2 * experts + 40, BF16) + 4 * unit(F32) * float(logits)
    scores = expected["scores"]
    assert_within(found["scores"], scores, relative * scores + rounding(scores, BF16))


@pytest.mark.some
@ways
def test_a_row_is_routed_the_same_alone_and_among_others(dtype: torch.dtype, described: bool) -> None:
    rows, experts, top_k = 300 if INTERPRETED else 8576, 60, 4
    x = operand(rows, INNER, dtype=dtype, apart=20)
    weight = operand(experts, INNER, dtype=dtype, seed=1, scale=2.0**-28 if INTERPRETED else INNER**-0.5)

    def routed(chosen: list[int]) -> dict[str, Tensor]:
        scores = torch.empty(len(chosen), top_k, dtype=dtype)
        case = Case("moe_route", {"x": x[chosen], "weight": weight}, {"scores": scores, "experts": scores.long()})
        case.attrs = {"top_k": top_k, "normalize": True}
        return run(case, DEVICE)

    everything = routed(list(range(rows)))
    for chosen in ([0], [rows - 1], list(range(70, 150))):
        for name, found in routed(chosen).items():
            assert torch.equal(found, everything[name][chosen])
