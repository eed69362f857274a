"""The results of a compiled model: the statistics of a step, and its memory by component."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mosaic.units import format_bytes

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The statistics of M rows, and the logits of R rows if asked for.

    Views of planned memory, valid until the next call of the model: `.clone()` to keep them. On a CUDA device a call
    that gives memory back empties them. They are copies, owned by the caller, if another thread may call the model in
    between: in every process with a second Python thread, except under `CompiledModel.exclusive`.

    Parameters
    ----------
    rows
        int64 [M], the rows of the packed batch that the statistics describe; owned by the caller.
    token_ids
        int64 [M], the most likely token; ties go to the lower id.
    confidence
        float32 [M], its probability.
    maximum, second, logsumexp, entropy
        float32 [M]: the two largest logits, log-sum-exp and entropy (natural logarithm) of the row.
    logits
        [R, V] in the model's dtype for the rows of `logits_for`, or None; of shifted families, row i is the official row
        i - 1 (`CompiledModel.__call__`).
    plan
        The plan that was in force; `plan.config` is the configuration.
    """

    rows: Tensor
    token_ids: Tensor
    confidence: Tensor
    maximum: Tensor
    second: Tensor
    logsumexp: Tensor
    entropy: Tensor
    logits: Tensor | None = None
    plan: Plan = field(repr=False)

    def clone(self) -> StepOutput:
        """Copy everything out of planned memory."""
        copies: dict[str, Any] = {name: value.clone() for name, value in self._views().items()}
        return replace(self, **copies)

    def tensors(self) -> list[Tensor]:
        """Return the views of planned memory."""
        return list(self._views().values())

    def _views(self) -> dict[str, Tensor]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "rows"}


def output_of(outputs: Mapping[str, Tensor], rows: Tensor, chosen: int, plan: Plan) -> StepOutput:
    """View a step's outputs by name: all rows of statistics, and `chosen` rows of logits."""
    names: Iterable[str] = ("confidence", "maximum", "second", "logsumexp", "entropy")
    return StepOutput(
        rows=rows,
        token_ids=outputs["token"][: len(rows)],
        logits=outputs["logits"][:chosen] if chosen else None,
        plan=plan,
        **{name: outputs[name][: len(rows)] for name in names},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes by pool (`weights`, `workspace`, each state, pinned `host`): planned, committed and resident.

    `resident` is measured by the operating system. Adopted parameters are the caller's: counted, not measured.
    `graph_bytes` are the bytes of captured graphs, which the ledger counts too. `in_use` is the CUDA device's own count
    over all processes; None on the CPU.
    """

    planned: Mapping[str, int]
    committed: Mapping[str, int]
    resident: Mapping[str, int]
    budget_bytes: int
    graph_bytes: int = 0
    in_use: int | None = None

    @classmethod
    def of(
        cls, planned: Mapping[str, int], committed: Mapping[str, int], resident: Mapping[str, int], **more: Any
    ) -> MemoryReport:
        """Report these, each for the pools of all; `host` only where there is some."""
        pools = dict.fromkeys(("weights", "workspace", *planned, *committed))
        pools = {name: None for name in pools if name != "host" or planned[name] or committed.get(name)}
        found = [{name: part.get(name, 0) for name in pools} for part in (planned, committed, resident)]
        return cls(planned=found[0], committed=found[1], resident=found[2], **more)

    def __str__(self) -> str:
        lines = [f"{'':<12}{'planned':>14}{'committed':>14}{'resident':>14}"]
        for name in self.planned:
            cells = (table.get(name, 0) for table in (self.planned, self.committed, self.resident))
            lines.append(f"{name:<12}" + "".join(f"{format_bytes(cell):>14}" for cell in cells))
        used = "" if self.in_use is None else f", {format_bytes(self.in_use)} of the device in use"
        graphs = f", {format_bytes(self.graph_bytes)} in captured graphs" if self.graph_bytes else ""
        return "\n".join([*lines, f"budget {format_bytes(self.budget_bytes)}{graphs}{used}"])
