"""What a card is: memory, bandwidth, rates, fixed bytes. Built-in profiles, and a user's own from TOML.

Figures that nobody measured on the card are estimates from data sheets, and
`estimated` says so wherever they are shown. Nothing here touches a driver.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from mosaic.errors import UnknownName, UsageError
from mosaic.units import GIB, MIB, parse_bytes

__all__ = ["DEFAULT_DEVICE", "DEVICES", "Device", "load_device"]

DEFAULT_DEVICE: Final = "rtx-4090"
_CONTEXT: Final = 520 * MIB
"""A CUDA context with PyTorch's and Triton's modules loaded: about 0.5 GiB on the cards we have seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device profile.

    Parameters
    ----------
    name
        What `--device` takes.
    backend
        Whose implementations run on it: `cuda` or `cpu`.
    memory_bytes
        What the driver shows as total.
    bandwidth
        Device memory, bytes per second.
    gemm_rates
        FLOP/s of a dense bf16 GEMM by its number of rows, interpolated in between.
    unembed_rates
        The same for the fused unembedding with statistics.
    attention_rate
        FLOP/s of full attention.
    host_link
        Pinned host to device, bytes per second.
    launch_s
        Seconds to launch one kernel.
    context_bytes, library_bytes
        Fixed bytes: the context with its modules, and library workspaces (cuBLAS).
    page_bytes
        Granularity of physical memory.
    host_bytes
        Host memory that may be pinned; 0 for none.
    estimated
        Whether figures come from data sheets rather than from `mosaic calibrate` or our own measurements.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    gemm_rates: Mapping[int, float]
    attention_rate: float
    unembed_rates: Mapping[int, float] = field(default_factory=dict)
    backend: str = "cuda"
    host_link: float = 24.8e9
    launch_s: float = 5e-6
    context_bytes: int = _CONTEXT
    library_bytes: int = 32 * MIB
    page_bytes: int = 2 * MIB
    host_bytes: int = 0
    estimated: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        positive = ("memory_bytes", "bandwidth", "attention_rate", "host_link", "page_bytes")
        for name in positive:
            if getattr(self, name) <= 0:
                raise UsageError(f"device '{self.name}': {name} must be positive, got {getattr(self, name)}")
        if self.memory_bytes <= self.context_bytes + self.library_bytes:
            raise UsageError(
                f"device '{self.name}': memory_bytes {self.memory_bytes} is not more than context and libraries take, "
                f"{self.context_bytes + self.library_bytes}"
            )
        if not self.gemm_rates or min(self.gemm_rates.values()) <= 0 or min(self.gemm_rates) < 1:
            raise UsageError(f"device '{self.name}': gemm_rates must map rows to positive FLOP/s")
        if self.page_bytes & (self.page_bytes - 1):
            raise UsageError(f"device '{self.name}': page_bytes must be a power of two, got {self.page_bytes}")


def _card(
    name: str, memory_gib: float, bandwidth: float, bf16_flops: float, *, link: float = 24.8e9, source: str
) -> Device:
    """A card known from its data sheet: 75 % of the dense bf16 peak for GEMMs, 45 % for attention, by rule of thumb."""
    rate = 0.75 * bf16_flops
    return Device(
        name=name,
        memory_bytes=int(memory_gib * 1024) * MIB,
        bandwidth=0.9 * bandwidth,
        gemm_rates={64: 0.5 * rate, 128: 0.8 * rate, 256: 0.95 * rate, 512: rate},
        unembed_rates={64: 0.3 * rate, 256: 0.5 * rate},
        attention_rate=0.45 * bf16_flops,
        host_link=link,
        source=source,
    )


H200: Final = Device(
    name="h200",
    memory_bytes=int(139.8 * GIB) // MIB * MIB,
    bandwidth=4.3e12,
    gemm_rates={
        64: 2.0e14, 128: 3.6e14, 256: 5.9e14, 512: 6.8e14, 1024: 6.9e14, 2048: 7.3e14, 4096: 6.65e14, 16384: 6.85e14,
    },
    unembed_rates={32: 1.16e14, 256: 3.5e14, 2048: 3.57e14},
    attention_rate=6.2e14,
    host_link=54.7e9,
    context_bytes=704 * MIB,  # context, modules and handles: 717 MiB seen with the 32 below, at 4K to 128K tokens
    estimated=False,
    source="measured on one H200, torch 2.11, bf16; mean of feed-forward and head shapes",
)  # fmt: skip

CPU: Final = Device(
    name="cpu",
    backend="cpu",
    memory_bytes=16 * GIB,
    bandwidth=2.0e10,
    gemm_rates={1: 2.0e10, 64: 1.0e11},
    unembed_rates={1: 1.0e10, 64: 5.0e10},
    attention_rate=5.0e10,
    host_link=2.0e10,
    launch_s=1.0e-5,
    context_bytes=0,
    library_bytes=0,
    page_bytes=4096,
    source="rule of thumb for a small machine",
)

DEVICES: Final[Mapping[str, Device]] = {
    device.name: device
    for device in (
        _card("rtx-3090", 23.7, 936e9, 71e12, source="data sheet; total as the driver shows it"),
        _card("rtx-4090", 23.6, 1008e9, 165e12, source="data sheet; total as the driver shows it"),
        _card("l40s", 44.4, 864e9, 362e12, source="data sheet; total as the driver shows it"),
        _card("a100-40g", 39.4, 1555e9, 312e12, source="data sheet; total as the driver shows it"),
        _card("a100-80g", 79.2, 2039e9, 312e12, source="data sheet; total as the driver shows it"),
        _card("h100", 79.2, 3350e9, 989e12, link=54.7e9, source="data sheet; total as the driver shows it"),
        H200,
        CPU,
    )
}


def load_device(name: str) -> Device:
    """A built-in profile by name, or a profile file (`my-card.toml`).

    Raises
    ------
    UnknownName
        Neither built in nor a file.
    UsageError
        A file that is not a valid profile.

    Examples
    --------
    >>> load_device("h200").estimated
    False
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise UnknownName("device", name, DEVICES, "A profile of your own is a .toml file: --device my-card.toml.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the device profile {name}: {error}.") from None
    return _from_table(table, path)


def _from_table(table: Mapping[str, Any], path: Path) -> Device:
    """Build a profile from TOML: sizes as text or bytes, everything unsaid taken from `base`."""
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
    base = {f.name: getattr(DEVICES[base_name], f.name) for f in fields(Device)}
    try:
        for key, value in values.items():
            base[key] = _value(key, value)
        return Device(**base)
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"device profile {path}: {error}.") from None


def _value(key: str, value: Any) -> Any:
    if key.endswith("_bytes"):
        if key in ("context_bytes", "library_bytes", "host_bytes") and value == 0:
            return 0
        return parse_bytes(str(value))
    if key.endswith("_rates"):
        return {int(rows): float(rate) for rows, rate in dict(value).items()}
    if key in ("name", "backend", "source"):
        return str(value)
    return bool(value) if key == "estimated" else float(value)
