"""Measure a card and make its profile: rates by size, bandwidths, the time of a launch, fixed bytes.

Everything is measured with the kernels of plans, one after the other as in a captured step, with weights that exceed
the cache. The card, its clock and its kernels come from a `Bench`, so that all of it is tested without a GPU; the one
for CUDA is in `cuda_card`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from mosaic.devices import GRAPH_BYTES, Device
from mosaic.errors import MosaicError, RuntimeMemoryError
from mosaic.kernels.shared.scratch import dtype_name
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as shipped
from mosaic.units import MIB, format_bytes, round_up

Call: TypeAlias = Callable[[], object]
"""One launch with its operands."""

_LAUNCHES: Final = 200
_CHECKED_ROWS: Final = 16
_TOLERANCE: Final = 2**-5
"""Relative to the largest value: probabilities and results are rounded to 2^-9 each; a wrong backend is off by 1."""
_USABLE: Final = 0.9
"""Share of the free memory that operands may take."""
_FIXED_MARGIN: Final = 16 * MIB + GRAPH_BYTES
"""For modules that the helper did not load: kernels of other shapes (some hundred KiB each), and captured graphs."""


class WrongResult(MosaicError):
    """A kernel whose results differ from its reference's, so that its time is meaningless."""


class Timer(Protocol):
    """Seconds of launches."""

    def captured(self, calls: Sequence[Call]) -> float:
        """Give the median seconds of one of the calls, run in turn as nodes of one captured step."""

    def eager(self, calls: Sequence[Call]) -> float:
        """Give the same for calls launched one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A card to measure.

    Parameters
    ----------
    device, backend
        PyTorch's device of tensors, and the backend of its kernels.
    memory_bytes, cache_bytes
        Total by its driver, and the size of its last cache.
    capability
        Compute capability of a CUDA card, 90 for sm_90.
    processors
        Its multiprocessors.
    versions
        Versions of the packages used, by name.
    load
        Gives the module of an operator and, if it has several, an implementation.
    pinned
        Gives a number of bytes of pinned host memory, uint8.
    """

    title: str
    device: str
    backend: str
    memory_bytes: int
    cache_bytes: int
    versions: Mapping[str, str]
    timer: Timer
    load: Callable[[str, str | None], Any]
    pinned: Callable[[int], Tensor]
    free_bytes: Callable[[], int]
    capability: int = 0
    processors: int = 132

    def call(
        self, operator: str, tensors: Mapping[str, Tensor], attrs: Mapping[str, Any], implementation: str | None = None
    ) -> Call:
        """Bind one launch, with scratch as in a plan."""
        specs = {name: Spec(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
        size = int(shipped(operator).scratch_bytes(self.backend, specs, attrs))
        scratch = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        call: Call = self.load(operator, implementation).bind(**tensors, **attrs, scratch=scratch)
        return call

    def random(self, *shape: int) -> Tensor:
        """Return normal bfloat16 data: a card's power, and with it its clock, depends on the bits."""
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return room for a result."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def holds(self, num_bytes: int) -> bool:
        """Tell whether the card has room for operands of this many bytes."""
        return num_bytes <= _USABLE * self.free_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes to measure: GEMMs of `rows` x `columns` over `inner`, products of `few_rows` with twice `feed` columns,
    attention of `heads` heads with at least `least_keys` keys, copies. `attention` are query rows times heads of a
    launch.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    inner: int
    few_rows: tuple[int, ...]
    feed: int
    vocabulary: int
    unembed_rows: tuple[int, ...]
    attention: tuple[int, ...]
    heads: int
    head_size: int
    least_keys: int
    copy_bytes: int
    link_bytes: int


FULL: Final = Sizes(
    rows=tuple(1 << n for n in range(5, 15)),
    columns=(256, 1024, 4096, 12288, 126464),
    inner=4096,
    few_rows=(16, 32, 64),
    feed=12288,
    vocabulary=126464,
    unembed_rows=tuple(1 << n for n in range(5, 15)),
    attention=tuple(1 << n for n in range(13, 21)),
    heads=32,
    head_size=128,
    least_keys=8192,
    copy_bytes=1 << 30,
    link_bytes=1 << 28,
)
QUICK: Final = replace(
    FULL,
    rows=(32, 256, 2048, 16384),
    columns=(256, 4096, 126464),
    unembed_rows=(32, 256, 2048),
    attention=(1 << 13, 1 << 16, 1 << 19),
    copy_bytes=1 << 28,
    link_bytes=1 << 26,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPart:
    """The memory of a process on the device, except its pages, after it has run steps.

    Parameters
    ----------
    used_bytes
        All of the process's bytes, by the device's counter.
    pages_bytes, library_bytes
        Parts of it: pages of plans, and memory of PyTorch's allocator (workspaces of cuBLAS).
    note
        Modules that could not be loaded, or empty.
    """

    used_bytes: int
    pages_bytes: int
    library_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The profile of a card, and further measurements: bytes per second, seconds, and notes on what was left out."""

    device: Device
    link_to_device: float
    link_to_host: float
    captured_launch_s: float
    eager_launch_s: float
    fixed: FixedPart
    notes: tuple[str, ...]


def calibrate(
    bench: Bench,
    *,
    name: str,
    date: str,
    fixed_part: Callable[[Device], FixedPart],
    sizes: Sizes = FULL,
    progress: Callable[[str], None] = lambda message: None,
) -> Calibration:
    """Measure a card, and return its profile; `date` goes into the profile's `source`.

    Parameters
    ----------
    fixed_part
        Measures the fixed part, for the profile so far.
    progress
        Called with the name of each measurement.

    Raises
    ------
    RuntimeMemoryError
        If other processes take the card's memory.
    WrongResult
        If no implementation of attention can be used.
    """
    notes: list[str] = []
    try:
        progress("launches and copies")
        captured, eager = launch_times(bench, sizes)
        bandwidth = memory_bandwidth(bench, sizes, captured)
        to_device, to_host = link_rates(bench, sizes, captured)
        gemms = gemm_rates(bench, sizes, captured, notes=notes, progress=progress)
        progress("products of few rows")
        few = few_rows_rates(bench, sizes, captured)
        progress("fused unembedding")
        unembeddings = unembed_rates(bench, sizes, captured)
        sampled = unembed_rates(bench, sizes, captured, sampled=True)
        attention = attention_rates(bench, sizes, captured, notes=notes, progress=progress)
    except torch.OutOfMemoryError:
        raise RuntimeMemoryError(
            f"{bench.title} ran out of memory with {format_bytes(bench.free_bytes())} free of "
            f"{format_bytes(bench.memory_bytes)}: end the other processes on it and calibrate again."
        ) from None
    versions = ", ".join(f"{package} {version}" for package, version in bench.versions.items())
    device = Device(
        name=name, backend=bench.backend, capability=bench.capability, processors=bench.processors,
        memory_bytes=bench.memory_bytes, bandwidth=_rounded(bandwidth),
        gemm_rates={columns: _rates(rates) for columns, rates in gemms.items()}, few_rows_rates=_rates(few),
        unembed_rates=_rates(unembeddings), sampled_unembed_rates=_rates(sampled),
        attention_rates={name: _rates(rates) for name, rates in attention.items()},
        host_link=_rounded(min(to_device, to_host)), launch_s=_rounded(captured),
        estimated=False, source=f"mosaic calibrate on {bench.title}, {versions}, {date}",
    )  # fmt: skip
    progress("context and libraries, in a process of their own")
    fixed = fixed_part(device)
    if fixed.note:
        notes.append(fixed.note)
    context = round_up(max(fixed.used_bytes - fixed.pages_bytes - fixed.library_bytes, 0), device.page_bytes)
    return Calibration(
        device=replace(device, context_bytes=context + _FIXED_MARGIN, library_bytes=fixed.library_bytes),
        link_to_device=to_device, link_to_host=to_host, captured_launch_s=captured, eager_launch_s=eager, fixed=fixed,
        notes=tuple(notes),
    )  # fmt: skip


def _rounded(value: float) -> float:
    """Four digits, the precision of the measurements."""
    return float(f"{value:.4g}")


def _rates(rates: Mapping[int, float]) -> dict[int, float]:
    return {size: _rounded(rate) for size, rate in rates.items()}


def launch_times(bench: Bench, sizes: Sizes) -> tuple[float, float]:
    """Measure the seconds of a norm of one row: as a node of a captured step, and launched by itself."""
    x, weight, y = bench.random(1, sizes.inner), bench.random(sizes.inner), bench.empty(1, sizes.inner)
    calls = [bench.call("rms_norm", {"x": x, "weight": weight, "y": y}, {"eps": 1e-6})] * _LAUNCHES
    return bench.timer.captured(calls), bench.timer.eager(calls)


_COLUMNS: Final = 1024
"""Elements of the element-wise kernel's operands."""


def memory_bandwidth(bench: Bench, sizes: Sizes, launch_s: float) -> float:
    """Measure bytes per second of the device's memory, read and written alike, by an element-wise kernel of a step.

    Not by a copy: in a graph copies are transfers, which reach 2.8 TB/s on an H200, while kernels reach 4.
    """
    rows = min(sizes.copy_bytes, bench.free_bytes() // 4) // (2 * _COLUMNS)
    gate, up = bench.random(rows, _COLUMNS), bench.random(rows, _COLUMNS)
    call = bench.call("silu_mul", {"gate": gate, "up": up}, {})
    return 3 * 2 * rows * _COLUMNS / _work(bench.timer.captured([call]), launch_s)


def link_rates(bench: Bench, sizes: Sizes, launch_s: float) -> tuple[float, float]:
    """Measure bytes per second from pinned host memory to the device, and back."""
    host = bench.pinned(sizes.link_bytes)
    there = torch.zeros(sizes.link_bytes, dtype=torch.uint8, device=bench.device)
    up, down = (bench.call("copy", {"x": x, "y": y}, {}) for x, y in ((host, there), (there, host)))
    return (
        sizes.link_bytes / _work(bench.timer.captured([up]), launch_s),
        sizes.link_bytes / _work(bench.timer.captured([down]), launch_s),
    )


def gemm_rates(
    bench: Bench, sizes: Sizes, launch_s: float, *, notes: list[str], progress: Callable[[str], None]
) -> dict[int, dict[int, float]]:
    """Measure FLOP/s of x[rows, inner] @ weight[columns, inner].T, by columns and rows.

    Weights take turns, so that each is read from memory as in a step; x and y may be cached, as in a step. Sizes that
    the card cannot hold are left out, with a note.
    """
    rates: dict[int, dict[int, float]] = {}
    for columns in sizes.columns:
        progress(f"GEMMs of {columns:,} columns")
        copies = _copies(bench, columns * sizes.inner)
        held = 2 * copies * columns * sizes.inner
        fitting = [rows for rows in sizes.rows if bench.holds(held + 2 * rows * (sizes.inner + columns))]
        if len(fitting) < len(sizes.rows):
            notes.append(f"GEMMs of {columns:,} columns: no room for {len(sizes.rows) - len(fitting)} of the sizes")
        if fitting:
            weights = [bench.random(columns, sizes.inner) for _ in range(copies)]
            rates[columns] = {rows: _gemm_rate(bench, rows, weights, launch_s) for rows in fitting}
            del weights
    if not rates:
        raise RuntimeMemoryError(
            f"{bench.title} has {format_bytes(bench.free_bytes())} free, too little for any GEMM: end the other processes "
            "on it and calibrate again."
        )
    return rates


def _copies(bench: Bench, elements: int) -> int:
    """Return the number of weights of this many 16-bit elements that exceed the cache together."""
    return max(1, -(-2 * bench.cache_bytes // (2 * elements)))


def _gemm_rate(bench: Bench, rows: int, weights: Sequence[Tensor], launch_s: float) -> float:
    columns, inner = weights[0].shape
    x, y = bench.random(rows, inner), bench.empty(rows, columns)
    calls = [bench.call("linear", {"x": x, "weight": weight, "y": y}, {}) for weight in weights]
    return 2 * rows * columns * inner / _work(bench.timer.captured(calls), launch_s)


def few_rows_rates(bench: Bench, sizes: Sizes, launch_s: float) -> dict[int, float]:
    """Measure FLOP/s of a feed-forward's norm, gate, up and activation in one launch, by rows; none if they do not fit.

    Weights take turns as for GEMMs.
    """
    copies = _copies(bench, 2 * sizes.feed * sizes.inner)
    if not bench.holds(4 * copies * sizes.feed * sizes.inner + (1 << 26)):
        return {}
    weights = [bench.random(2, sizes.feed, sizes.inner) for _ in range(copies)]
    norm, rates = bench.random(sizes.inner), {}
    for rows in sizes.few_rows:
        given = {"x": bench.random(rows, sizes.inner), "norm": norm, "y": bench.empty(rows, sizes.feed)}
        calls = [bench.call("norm_gate_up", {**given, "gate": gate, "up": up}, {"eps": 1e-6}) for gate, up in weights]
        rates[rows] = 4 * rows * sizes.feed * sizes.inner / _work(bench.timer.captured(calls), launch_s)
    return rates


def unembed_rates(bench: Bench, sizes: Sizes, launch_s: float, *, sampled: bool = False) -> dict[int, float]:
    """Measure FLOP/s of the fused unembedding with statistics, or with samples, by rows; none if it does not fit."""
    if not bench.holds(2 * sizes.vocabulary * sizes.inner + (1 << 26)):
        return {}
    weight = bench.random(sizes.vocabulary, sizes.inner)
    rates = {}
    for rows in sizes.unembed_rows:
        outputs = {
            name: bench.empty(rows, dtype=torch.float32) for name in ("maximum", "second", "logsumexp", "entropy")
        }
        token = bench.empty(rows, dtype=torch.int64)
        operands = {"x": bench.random(rows, sizes.inner), "weight": weight, "token": token, **outputs}
        if sampled:
            operands |= {
                "keys": torch.arange(rows, out=bench.empty(rows, dtype=torch.int64)),
                "temperature": bench.empty(rows, dtype=torch.float32).fill_(1.0),
                "sample": bench.empty(rows, dtype=torch.int64),
                "sample_logit": bench.empty(rows, dtype=torch.float32),
            }
        seconds = bench.timer.captured([bench.call("unembed_sample" if sampled else "unembed_stats", operands, {})])
        rates[rows] = 2 * rows * weight.numel() / _work(seconds, launch_s)
    return rates


def attention_rates(
    bench: Bench, sizes: Sizes, launch_s: float, *, notes: list[str], progress: Callable[[str], None]
) -> dict[str, dict[int, float]]:
    """Measure FLOP/s of attention over one sequence, by implementation and query rows times heads.

    Each is compared with a float32 reference at every size before it is timed. An implementation that is wrong or not installed
    is left out with a note; if none is left, `WrongResult` is raised.
    """
    rates: dict[str, dict[int, float]] = {}
    specs = {"q": Spec((1, sizes.head_size), "bfloat16"), "cu_seqlens": Spec((2,), "int32")}
    for implementation in shipped("attention").serving(bench.backend, specs, {"head_size": sizes.head_size}):
        progress(f"attention, {implementation}")
        try:
            rates[implementation] = {
                size: _attention_rate(bench, sizes, implementation, size // sizes.heads, launch_s)
                for size in sizes.attention
            }
        except MosaicError as error:
            notes.append(f"attention by {implementation} is left out: {error}")
    if not rates:
        raise WrongResult(f"no attention can be used on {bench.title}: {'; '.join(notes)}")
    return rates


def _attention_rate(bench: Bench, sizes: Sizes, implementation: str, rows: int, launch_s: float) -> float:
    width, keys = sizes.heads * sizes.head_size, max(rows, sizes.least_keys)
    q, k, v = bench.random(rows, width), bench.random(keys, width), bench.random(keys, width)
    operands = {"q": q, "k": k, "v": v, "y": bench.empty(rows, width)}
    operands["cu_seqlens"] = torch.tensor([0, keys], dtype=torch.int32, device=bench.device)
    attrs = {"head_size": sizes.head_size, "scale": sizes.head_size**-0.5, "span": keys}
    call = bench.call("attention", operands, attrs, implementation)
    call()
    _check_attention(operands, sizes.head_size, implementation)
    return 4 * rows * keys * width / _work(bench.timer.captured([call]), launch_s)


def _check_attention(operands: Mapping[str, Tensor], head_size: int, implementation: str) -> None:
    """Compare some rows of y with softmax(q k^T / sqrt(head_size)) v in float32, head by head."""
    q, k, v, y = (operands[name] for name in "qkvy")
    rows = torch.linspace(0, len(q) - 1, min(_CHECKED_ROWS, len(q)), device=q.device).long()
    worst = largest = torch.zeros((), device=q.device)
    for start in range(0, q.shape[1], head_size):
        head = slice(start, start + head_size)
        scores = q[rows, head].float() @ k[:, head].float().t() * head_size**-0.5
        expected = torch.softmax(scores, dim=1) @ v[:, head].float()
        worst = torch.maximum(worst, (y[rows, head].float() - expected).abs().amax())
        largest = torch.maximum(largest, expected.abs().amax())
    error, bound = float(worst), _TOLERANCE * float(largest)
    if not error <= bound:  # NaN is wrong too
        raise WrongResult(
            f"with {len(q):,} query rows and {len(k):,} keys its values are off by {error:.3g}, where rounding explains "
            f"{bound:.3g}; its time is not recorded. Update {implementation}, or report it."
        )


def _work(seconds: float, launch_s: float) -> float:
    """A launch's seconds without `launch_s`, which predictions add again."""
    return max(seconds - launch_s, seconds / 2)
