"""Claims of a valid plan that its file alone cannot prove: a verdict lists them.

Everything else is derived from the file, or compared with what is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from mosaic.planner.check.columns import FULL_STEP, MAIN
from mosaic.planner.check.operators import OPERATORS

_PROFILE: Final = (
    "device", "capability", "estimated", "device_memory_bytes", "page_bytes", "components.context", "components.library",
)  # fmt: skip


class Unproved(NamedTuple):
    """An unproved claim of a file, and what would prove it."""

    claim: str
    needs: str

    def __str__(self) -> str:
        return f"{self.claim} ({self.needs})"


def unproved_claims(document: Mapping[str, Any]) -> list[Unproved]:
    """List claims of a valid document that `check_plan` cannot prove.

    Parameters
    ----------
    document
        A plan in which `check_plan` finds nothing.

    Returns
    -------
    list of Unproved
        In a fixed order; the last ones depend on what the plan has: choices, unknown kernels, scratch.
    """
    return [
        Unproved("model, mosaic_version, phase, names, tensors", "the graph is not compared with the model's"),
        Unproved(", ".join(_PROFILE), "the device's profile"),
        Unproved("predicted_step_ms and the trace's times", "the cost model"),
        _context(document),
        Unproved("solver and the search's moves and configurations", "the search"),
        Unproved("budget_bytes, host_budget_bytes", "the request of the plan"),
        Unproved("that no setting and no size is missing", "planning again"),
        *_settings(document),
        *_launches(document),
    ]


def unverified_operators(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the operators of a plan whose meaning no checker knows, for Mosaic does not ship them, in order of their ops.

    The plan's memory is proved for the operands that it names; shapes, FLOPs, bytes and what may be in place are the
    author's word.
    """
    return tuple(dict.fromkeys(row["kernel"] for row in document["ops"] if row["kernel"] not in OPERATORS))


def _context(document: Mapping[str, Any]) -> Unproved:
    dims = document["dims"]
    if document["fits"] and dims.get("seqs") == 1 and "tokens" in dims:
        return Unproved(f"max_ctx_tokens, but that {dims['tokens']} tokens fit", "planning again")
    return Unproved("max_ctx_tokens", "planning again")


def _settings(document: Mapping[str, Any]) -> Iterator[Unproved]:
    """Options of choices, knobs that no loop shows, dims that nothing shows."""
    config, shown = document["config"], {row["knob"] for row in document["regions"]}
    choices = [name for name, value in config.items() if isinstance(value, str)]
    off = [name for name, value in config.items() if value is None and name not in shown]
    if choices:
        yield Unproved(f"config: the options of {', '.join(choices)}", "planning again")
    if off:
        yield Unproved(f"config: that {', '.join(off)} could have been on", "planning again")
    free = [name for name in document["dims"] if name not in {row["dim"] for row in document["regions"]}]
    if free and document["phase"] != FULL_STEP:
        yield Unproved(f"dims {', '.join(free)}", "in this phase no loop and no rule shows them")
    if all(row["tensor"] is None and row["kind"] != "weight" for row in document["buffers"]):
        yield Unproved("dtype", "the plan has no weights")


def _launches(document: Mapping[str, Any]) -> Iterator[Unproved]:
    """Kernels and attributes that no shape depends on, names of streams, and scratch."""
    if "declared" not in document and any(row["stream"] != MAIN for row in document["ops"]):
        yield Unproved("names of streams", "a plan that declares them")
    kernels = Counter(row["kernel"] for row in document["ops"])
    silent = {
        key: None
        for name in kernels
        if name in OPERATORS
        for key in OPERATORS[name].silent
        if any(row["kernel"] == name and key in row["attrs"] for row in document["ops"])
    }
    if silent:
        yield Unproved(f"attributes {', '.join(silent)}", "the model's configuration: no shape and no count tells them")
    unknown = [f"{name} ({kernels[name]} ops)" for name in unverified_operators(document)]
    if unknown:
        yield Unproved(f"what the kernels {', '.join(unknown)} touch and cost", "kernels that Mosaic does not ship")
    if any(row["kind"] == "scratch" for row in document["buffers"]):
        yield Unproved("sizes of scratch buffers", "the backend's kernels")
