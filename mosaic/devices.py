"""Device profiles: memory, bandwidth, rates, fixed bytes. Some are built in; users load their own from TOML.

Figures that were not measured on the card are estimates from data sheets, and `estimated` is true. Nothing here calls a
driver.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

from mosaic.errors import UnknownName, UsageError
from mosaic.units import GIB, MIB, parse_bytes

Rates: TypeAlias = Mapping[int, float]
"""FLOP/s by size, interpolated over the logarithm of the size, constant beyond both ends."""

DEFAULT_DEVICE: Final = "rtx-4090"
ANY_COLUMNS: Final = 1
"""The single column count of `gemm_rates` if rates were given by rows alone: it serves all column counts."""
_ATTENTION: Final = {"cuda": ("cudnn", "triton"), "cpu": ("cpu",)}
_CONTEXT: Final = 520 * MIB
"""A CUDA context with PyTorch's and Triton's modules loaded, where nothing was measured. Kernels for Hopper take more."""
GRAPH_BYTES: Final = 16 * MIB
"""The part of `context_bytes` for captured graphs, reserved in every plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device profile.

    Parameters
    ----------
    backend
        The backend whose implementations run on it: `cuda` or `cpu`.
    capability
        Compute capability of a card, 90 for sm_90. Only plans for exactly this number take kernels made for such cards.
    processors
        Multiprocessors of a card, among which kernels divide their work.
    memory_bytes
        The total that the driver reports.
    bandwidth
        Device memory, bytes per second.
    gemm_rates
        FLOP/s of a dense bf16 GEMM by output columns, then by rows; {rows: rate} alone means any columns.
    few_rows_rates
        FLOP/s of products of few rows, by rows; if empty, the rates of GEMMs of up to 64 rows, whatever the rows.
    unembed_rates
        FLOP/s of the fused unembedding with statistics by rows; if empty, the rates of GEMMs.
    sampled_unembed_rates
        The same with a sample of each row as well; if empty, the rates without.
    attention_rates
        FLOP/s of full attention by implementation, then by the query rows times heads of a launch.
    host_link
        Pinned host memory to the device, and back at the same time: bytes per second, each direction.
    launch_s
        Seconds that an op takes in addition to its work: one node of a captured step.
    context_bytes, library_bytes
        Fixed bytes: the context with its modules and `GRAPH_BYTES` of captured graphs, and library workspaces (cuBLAS).
    page_bytes
        Granularity of physical memory.
    host_bytes
        The default host budget: host memory that may be pinned; 0 for none.
    estimated, source
        Whether figures come from data sheets rather than measurements, and their source.

    Raises
    ------
    UsageError
        Naming the device, the field, the expected and the actual value.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    gemm_rates: Mapping[int, Rates]
    attention_rates: Mapping[str, Rates]
    few_rows_rates: Rates = field(default_factory=dict)
    unembed_rates: Rates = field(default_factory=dict)
    sampled_unembed_rates: Rates = field(default_factory=dict)
    backend: str = "cuda"
    capability: int = 0
    processors: int = 132
    host_link: float = 24.8e9
    launch_s: float = 5e-6
    context_bytes: int = _CONTEXT
    library_bytes: int = 32 * MIB
    page_bytes: int = 2 * MIB
    host_bytes: int = 0
    estimated: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if self.backend not in _ATTENTION:
            raise UnknownName("backend", self.backend, _ATTENTION, f"(device '{self.name}')")
        for name in ("memory_bytes", "page_bytes"):
            self._require(name, "a positive number of bytes", _is_count(getattr(self, name), least=1))
        for name in ("context_bytes", "library_bytes", "host_bytes"):
            self._require(name, "a number of bytes from 0", _is_count(getattr(self, name), least=0))
        self._require("capability", "a number such as 90, or 0 for none", _is_count(self.capability, least=0))
        self._require("processors", "a number from 1", _is_count(self.processors, least=1))
        for name in ("bandwidth", "host_link"):
            self._require(name, "positive bytes per second", _is_positive(getattr(self, name)))
        self._require("launch_s", "seconds from 0", self.launch_s == 0 or _is_positive(self.launch_s))
        self._require("page_bytes", "a power of two", not self.page_bytes & (self.page_bytes - 1))
        if self.memory_bytes <= self.context_bytes + self.library_bytes:
            raise UsageError(
                f"device '{self.name}': memory_bytes {self.memory_bytes} is not more than context and libraries take, "
                f"{self.context_bytes + self.library_bytes}"
            )
        object.__setattr__(self, "gemm_rates", self._gemm_rates())
        object.__setattr__(self, "attention_rates", self._attention_rates())
        for name in ("few_rows_rates", "unembed_rates", "sampled_unembed_rates"):
            object.__setattr__(self, name, self._rates(name, getattr(self, name), "rows"))

    @property
    def balanced_rows(self) -> int:
        """Rows with which a product takes as long to compute, at its best rate, as its bf16 weights to be read.

        >>> load_device("h200").balanced_rows
        158
        """
        return math.ceil(max(max(rates.values()) for rates in self.gemm_rates.values()) / self.bandwidth)

    def _require(self, name: str, expected: str, holds: bool) -> None:
        if not holds:
            raise UsageError(f"device '{self.name}': {name} must be {expected}, got {getattr(self, name)!r}")

    def _gemm_rates(self) -> dict[int, Rates]:
        """By columns and rows, both ascending; rates by rows alone serve any columns."""
        given: Any = _as_mapping(self.gemm_rates)
        nested = [isinstance(value, Mapping) for value in (given or {}).values()]
        if not nested or any(nested) != all(nested):
            raise UsageError(
                f"device '{self.name}': gemm_rates must map columns to {{rows: FLOP/s}}, or rows to FLOP/s, "
                f"got {self.gemm_rates!r}"
            )
        table = given if all(nested) else {ANY_COLUMNS: given}
        rates = {
            self._size("gemm_rates", columns): self._rates(f"gemm_rates[{columns}]", by_rows, "rows")
            for columns, by_rows in table.items()
        }
        if not all(rates.values()):
            raise UsageError(f"device '{self.name}': gemm_rates must have a rate for every number of columns")
        return dict(sorted(rates.items()))

    def _attention_rates(self) -> dict[str, Rates]:
        given: Any = _as_mapping(self.attention_rates)
        for implementation in given or {}:
            if implementation not in _ATTENTION[self.backend]:
                known = _ATTENTION[self.backend]
                raise UnknownName("implementation of attention", implementation, known, f"(device '{self.name}')")
        rates = {
            implementation: self._rates(f"attention_rates.{implementation}", by_size, "query rows times heads")
            for implementation, by_size in (given or {}).items()
        }
        if not rates or not all(rates.values()):
            raise UsageError(
                f"device '{self.name}': attention_rates must map an implementation "
                f"({', '.join(_ATTENTION[self.backend])}) to {{query rows times heads: FLOP/s}}, "
                f"got {self.attention_rates!r}"
            )
        return dict(sorted(rates.items()))

    def _rates(self, name: str, given: Any, by: str) -> dict[int, float]:
        table = _as_mapping(given)
        if table is None:
            raise UsageError(f"device '{self.name}': {name} must map {by} to FLOP/s, got {given!r}")
        rates = {self._size(name, size): rate for size, rate in table.items()}
        for size, rate in rates.items():
            if not _is_positive(rate):
                raise UsageError(f"device '{self.name}': {name}[{size}] must be positive FLOP/s, got {rate!r}")
        return {size: float(rates[size]) for size in sorted(rates)}

    def _size(self, name: str, key: Any) -> int:
        """A row or column count, which in TOML is a string."""
        try:
            size = int(key)
        except (TypeError, ValueError):
            size = 0
        if size < 1:
            raise UsageError(f"device '{self.name}': {name} must be by positive integers, got the key {key!r}")
        return size


def _as_mapping(value: Any) -> Mapping[Any, Any] | None:
    return value if isinstance(value, Mapping) else None


def _is_count(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: Any) -> bool:
    """Whether it is a positive, finite number (not NaN, no bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _card(
    name: str,
    memory_gib: float,
    bandwidth: float,
    bf16_flops: float,
    capability: int,
    processors: int,
    *,
    attention: float = 0.55,
    link: float = 24.8e9,
    context: int = _CONTEXT,
) -> Device:
    """A card's profile from its data sheet, by rule of thumb.

    GEMMs reach 75 % of the dense bf16 peak once they have as many output tiles as 512 rows of 2,048 columns; attention
    reaches `attention` of the peak with cuDNN and 45 % with Triton from 2^15 query rows times heads on.
    """
    rate = 0.75 * bf16_flops
    shares = {64: 0.5, 128: 0.8, 256: 0.95, 512: 1.0}
    return Device(
        name=name,
        memory_bytes=int(memory_gib * 1024) * MIB,
        bandwidth=0.9 * bandwidth,
        capability=capability,
        processors=processors,
        gemm_rates={
            columns: {rows * 2048 // columns: share * rate for rows, share in shares.items()} for columns in (256, 2048)
        },
        unembed_rates={64: 0.3 * rate, 256: 0.5 * rate},
        sampled_unembed_rates={64: 0.2 * rate, 256: 0.3 * rate},
        attention_rates={
            implementation: {1 << 13: 0.5 * share * bf16_flops, 1 << 15: share * bf16_flops}
            for implementation, share in (("cudnn", attention), ("triton", 0.45))
        },
        host_link=link,
        context_bytes=context,
        source="data sheet; total as the driver shows it",
    )


CPU: Final = Device(
    name="cpu",
    backend="cpu",
    memory_bytes=16 * GIB,
    bandwidth=2.0e10,
    gemm_rates={ANY_COLUMNS: {1: 2.0e10, 64: 1.0e11}},
    few_rows_rates={1: 1.0e10},  # the same products as the unfused ones; not optimised
    unembed_rates={1: 1.0e10, 64: 5.0e10},
    attention_rates={"cpu": {1: 5.0e10}},
    host_link=2.0e10,
    launch_s=1.0e-5,
    context_bytes=0,
    library_bytes=0,
    page_bytes=4096,
    source="rule of thumb for a small machine",
)

_HOPPER: Final = Device(**tomllib.loads((Path(__file__).parent / "profiles/h200.toml").read_text(encoding="utf-8")))
"""A measured card: the file that `mosaic calibrate` wrote on it."""

DEVICES: Final[Mapping[str, Device]] = {
    device.name: device
    for device in (
        _card("rtx-3090", 23.7, 936e9, 71e12, 86, 82),
        _card("rtx-4090", 23.6, 1008e9, 165e12, 89, 128),
        _card("l40s", 44.4, 864e9, 362e12, 89, 142),
        _card("a100-40g", 39.4, 1555e9, 312e12, 80, 108),
        _card("a100-80g", 79.2, 2039e9, 312e12, 80, 108),
        _card("h100", 79.1, 3350e9, 989e12, 90, 132, attention=0.6, link=54.7e9, context=_HOPPER.context_bytes),
        _HOPPER,
        CPU,
    )
}


def load_device(name: Device | str | Path | None = None) -> Device:
    """Return a profile: a built-in one by name, a file (`my-card.toml`), or as given; `DEFAULT_DEVICE` if not given.

    Raises
    ------
    UnknownName
        If it is neither built in nor a file.
    UsageError
        If the file is no valid profile, or the name is empty.

    Examples
    --------
    >>> load_device("h200").estimated
    False
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str | Path | None):
        raise UsageError(f"a device is a profile's name, a .toml file or a mosaic.Device, got {name!r}.")
    if (name or DEFAULT_DEVICE) in DEVICES:
        return DEVICES[str(name or DEFAULT_DEVICE)]
    path = Path(name or "")
    if path.suffix != ".toml":
        raise UnknownName("device", str(name), DEVICES, "A profile of your own is a .toml file: --device my-card.toml.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the device profile {name}: {error}.") from None
    return _from_table(table, path)


def to_toml(device: Device) -> str:
    """Write a profile as TOML for `load_device`, with every field, so that it needs no base.

    Examples
    --------
    >>> to_toml(DEVICES["cpu"]).splitlines()[0]
    'name = "cpu"'
    """
    lines, tables = [], []
    for name in (f.name for f in fields(Device)):
        value = getattr(device, name)
        if not isinstance(value, Mapping):
            lines.append(f"{name} = {_toml_value(value)}")
            continue
        nested = {key: rates for key, rates in value.items() if isinstance(rates, Mapping)}
        for title, rates in [(f"{name}.{key}", rates) for key, rates in nested.items()] or [(name, value)]:
            tables += ["", f"[{title}]", *(f"{size} = {_toml_value(rate)}" for size, rate in rates.items())]
    return "\n".join([*lines, *tables]) + "\n"


def _toml_value(value: str | bool | int | float) -> str:
    """A JSON string is a TOML string, except that TOML escapes DEL."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(float(value) if isinstance(value, float) else value)


def _from_table(table: Mapping[str, Any], path: Path) -> Device:
    """Build a profile from TOML: sizes as text or bytes, missing fields taken from `base`."""
    values = dict(table)
    base_name = str(values.pop("base", DEFAULT_DEVICE))
    if base_name not in DEVICES:
        raise UnknownName("base device", base_name, DEVICES)
    known = {f.name for f in fields(Device)}
    for key in values:
        if key not in known:
            raise UnknownName("field of a device profile", key, sorted(known), f"(in {path})")
    values.setdefault("name", path.stem)
    values.setdefault("source", path.name)
    built = {f.name: getattr(DEVICES[base_name], f.name) for f in fields(Device)}
    try:
        return Device(**built | {key: _value(key, value) for key, value in values.items()})
    except UsageError as error:
        raise UsageError(f"device profile {path}: {error}") from None


def _value(key: str, value: Any) -> Any:
    """Convert one field to the type that `Device` takes; `Device` checks its value."""
    if key.endswith("_bytes"):
        return 0 if value == 0 else parse_bytes(str(value))
    if key in ("name", "backend", "source"):
        return _typed(key, value, str, "text")
    if key == "estimated":
        return _typed(key, value, bool, "true or false")
    return value


def _typed(key: str, value: Any, kind: type, expected: str) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"{key} must be {expected}, got {value!r}")
    return value
