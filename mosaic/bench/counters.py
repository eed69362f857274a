"""What a server says of itself at `/metrics`: vLLM's counters of diffusion models, and Mosaic's own, where it has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from mosaic.bench.traffic import Load
from mosaic.errors import MosaicError

__all__ = ["Counters", "counters", "growth"]

_COUNTERS: Final[Mapping[str, str]] = {
    "vllm:diffusion_num_denoising_steps_total": "steps", "vllm:diffusion_num_canvas_positions_total": "positions",
    "vllm:diffusion_num_committed_tokens_total": "committed", "mosaic:step_seconds_total": "step_seconds",
}  # fmt: skip
_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """A reading.

    Parameters
    ----------
    grown
        Counters that the server has, by "steps", "positions", "committed" and "step_seconds".
    memory
        Bytes by kind, "planned" or "committed", and pool.
    """

    grown: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


async def counters(session: aiohttp.ClientSession, load: Load) -> Counters:
    """Read a server's metrics; nothing if it has none.

    Raises
    ------
    MosaicError
        If the server cannot be reached.
    """
    try:
        async with session.get(f"{load.base_url}/metrics", timeout=aiohttp.ClientTimeout(total=30)) as response:
            text = await response.text(errors="replace") if response.status == 200 else ""
    except aiohttp.ClientConnectorError as error:
        raise MosaicError(f"no server at {load.base_url}: {error}.") from None
    except (aiohttp.ClientError, OSError, TimeoutError):
        text = ""  # the load itself says what else is wrong with it
    return _read(text)


def _read(text: str) -> Counters:
    grown, memory = dict[str, float](), dict[str, dict[str, float]]()
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if name in _COUNTERS:
            grown[_COUNTERS[name]] = grown.get(_COUNTERS[name], 0.0) + number
        elif name == "mosaic:memory_bytes":
            found = dict(_LABEL.findall(labels or ""))
            pools, pool = memory.setdefault(found.get("kind", ""), {}), found.get("pool", "")
            pools[pool] = pools.get(pool, 0.0) + number
    return Counters(grown=grown, memory=memory)


def growth(before: Counters, after: Counters, seconds: float) -> dict[str, Any]:
    """Return what a server has done between two readings, `seconds` apart.

    Names that begin with `diffusion_` are vLLM's, and computed as there: a canvas (a block) has positions / steps positions, as
    many tokens become final with it, and one step of each commits it. Steps that commit are left out of
    `diffusion_denoising_steps`, and counted in `forwards_per_token`.
    """
    steps, positions, committed, busy = (
        after.grown.get(name, 0.0) - before.grown.get(name, 0.0)
        for name in ("steps", "positions", "committed", "step_seconds")
    )
    found: dict[str, Any] = {}
    if committed > 0 < busy:
        found |= {"in_step_throughput": committed / busy, "in_step_seconds": busy}
    if not (steps > 0 < positions and committed > 0):
        return found
    canvases = committed * steps / positions
    denoising = steps - canvases
    return found | {
        "forwards_per_token": steps / committed,
        "block_throughput": canvases / seconds,
        "diffusion_committed_throughput": committed / seconds,
        "diffusion_steps_per_canvas": denoising / canvases,
        "diffusion_committed_per_step": committed / denoising if denoising > 0 else None,
        "diffusion_committed_tokens": round(committed),
        "diffusion_denoising_steps": round(denoising),
        "diffusion_canvas_positions": round(positions),
    }
