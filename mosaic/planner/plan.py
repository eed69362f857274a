"""The plan: a frozen, versioned document that says where every byte goes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mosaic.errors import PlanFormatError
from mosaic.files import write_atomic
from mosaic.planner.document import SCHEMA

__all__ = ["Place", "Plan"]

Place: TypeAlias = tuple[str, int, int]
"""Pool, offset there, and size in bytes."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """A plan, read-only. `document` is its JSON form; the properties are what people ask of it first.

    Examples
    --------
    >>> from mosaic.planner import plan
    >>> p = plan("llada-8b", tokens=4096, device="h200")
    >>> p.fits, p.peak_bytes == p.lower_bound_bytes
    (True, True)
    """

    document: Mapping[str, Any]

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.document["model"])

    @property
    def device(self) -> str:
        """Name of the device profile."""
        return str(self.document["device"])

    @property
    def dims(self) -> Mapping[str, int]:
        """Values of the symbolic dims."""
        return dict(self.document["dims"])

    @property
    def config(self) -> Mapping[str, int | str | None]:
        """Rows per chunk of every knob (None: off) and the option of every choice."""
        return dict(self.document["config"])

    @property
    def weights(self) -> Mapping[str, Place]:
        """Where each weight lies, by its tensor's name (the buffer's, where it has none): one address for all plans of a
        model with the same weights streamed."""
        return {
            record["tensor"] or record["name"]: (record["pool"], record["offset"], record["size"])
            for record in self.document["buffers"]
            if record["kind"] == "weight" or (record["kind"] == "host" and record["tensor"] is not None)
        }

    @property
    def fits(self) -> bool:
        """Whether the total is within the budget."""
        return bool(self.document["fits"])

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes of context, library, weights, state and workspace, in whole pages."""
        return dict(self.document["components"])

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole request on the device."""
        return int(self.document["total_bytes"])

    @property
    def budget_bytes(self) -> int:
        """Bytes that the request may take."""
        return int(self.document["budget_bytes"])

    @property
    def peak_bytes(self) -> int:
        """Highest address in use in the workspace."""
        return int(self.document["peak_bytes"])

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes of the largest live set: no assignment can be below it."""
        return int(self.document["lower_bound_bytes"])

    @property
    def optimal(self) -> bool:
        """Whether the peak equals the lower bound."""
        return bool(self.document["optimal"])

    @property
    def max_ctx_tokens(self) -> int:
        """Largest context that fits the same device, budget and mask ratio."""
        return int(self.document["max_ctx_tokens"])

    @property
    def predicted_step_ms(self) -> float:
        """Predicted time of the step, milliseconds."""
        return float(self.document["predicted_step_ms"])

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal plans have equal digests."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}={value}" for name, value in self.dims.items() if name == "tokens" or "tokens" not in self.dims
        )
        state = "fits" if self.fits else "does not fit"
        return (
            f"Plan({self.model}, {sizes}, device={self.device}, {self.total_bytes} of {self.budget_bytes} B, {state})"
        )

    def _repr_png_(self) -> bytes | None:
        """The timeline and the address map, where matplotlib is installed (notebooks)."""
        from mosaic.errors import MissingExtra

        try:
            from mosaic.viz.charts import plan_png

            return plan_png(self.document)
        except MissingExtra:
            return None

    def to_json(self) -> str:
        """Canonical JSON: byte-identical for identical input."""
        return json.dumps(self.document, separators=(",", ":"), ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the JSON, whole or not at all."""
        write_atomic(path, self.to_json())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan; `check` proves it.

        Raises
        ------
        PlanFormatError
            Not JSON, not a plan, or a schema this version does not know.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanFormatError(f"not a plan: {error}.") from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if not isinstance(schema, str) or not schema.startswith("mosaic.plan/"):
            raise PlanFormatError("not a plan: it has no schema 'mosaic.plan/…'.")
        if schema != SCHEMA:
            raise PlanFormatError(
                f"the plan is of schema '{schema}', this version reads '{SCHEMA}'; upgrade mosaic-dllm."
            )
        return cls(document)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file and make sure that it has a plan's structure; `check` proves the rest."""
        from mosaic.planner.check import check_plan

        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanFormatError(f"cannot read the plan {path}: {error}.") from None
        try:
            plan = cls.from_json(text)
            malformed = [v for v in check_plan(plan.document) if v.code in ("format", "id")]
        except PlanFormatError as error:
            raise PlanFormatError(f"{path}: {error}") from None
        if malformed:
            raise PlanFormatError(f"{path}: not a readable plan: {malformed[0].message}; plan again.")
        return plan

    def check(self) -> None:
        """Prove the plan with the independent checker.

        Raises
        ------
        CheckFailed
            Listing every violation.
        """
        from mosaic.planner.check import require_valid

        require_valid(self.document)
