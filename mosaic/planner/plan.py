"""The plan: a frozen, versioned document of every byte's place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mosaic.errors import PlanFormatError
from mosaic.files import write_atomic
from mosaic.planner.check import (
    WeightMap,
    require_safe,
    require_valid,
    require_well_formed,
    unverified_operators,
    weight_map,
)
from mosaic.planner.document import SCHEMA, Draft
from mosaic.planner.plan_records import PlanRecords
from mosaic.registrar.operator import Operator


class Plan:
    """A plan, read-only. `document` is its JSON form; properties give its main figures.

    Parameters
    ----------
    document
        The JSON form, or a planner's draft, whose document is written on first use.
    operators
        Operators of its ops that Mosaic does not ship, by name: a draft carries its own, JSON has none.

    Attributes
    ----------
    operators
        The same, for the executor. They are no part of the document.

    Examples
    --------
    >>> from mosaic.planner import plan
    >>> p = plan("llada-8b", tokens=4096, device="h200")
    >>> p.fits, p.peak_bytes == p.lower_bound_bytes
    (True, True)
    """

    __slots__ = ("_document", "_draft", "_records", "operators")

    def __init__(self, document: Mapping[str, Any] | Draft, *, operators: Mapping[str, Operator] | None = None) -> None:
        self.operators = {**(document.operators if isinstance(document, Draft) else {}), **(operators or {})}
        self._draft: Draft | None = None
        self._document: Mapping[str, Any] | None = None
        self._records: PlanRecords | None = None
        if isinstance(document, Draft):
            self._draft = document
        else:
            self._document = document

    @property
    def document(self) -> Mapping[str, Any]:
        """The plan as its JSON reads."""
        if self._document is None:
            assert self._draft is not None
            self._document = self._draft.document()
        return self._document

    @property
    def records(self) -> PlanRecords:
        """The document's rows as typed records."""
        if self._records is None:
            self._records = PlanRecords(self.document)
        return self._records

    @property
    def _header(self) -> Mapping[str, Any]:
        """The document's fields but formula, trace and the lists of rows."""
        return self.document if self._draft is None else self._draft.header

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self._header["model"])

    @property
    def device(self) -> str:
        """Name of the device profile."""
        return str(self._header["device"])

    @property
    def dims(self) -> Mapping[str, int]:
        """Values of the symbolic dims."""
        return dict(self._header["dims"])

    @property
    def config(self) -> Mapping[str, int | str | None]:
        """Rows per chunk of every knob (None: off) and the option of every choice."""
        return dict(self._header["config"])

    @property
    def weights(self) -> WeightMap:
        """The place of each weight, by its tensor's name (or else the buffer's): the same in all plans of a model that
        stream the same weights."""
        return weight_map(self.document)

    @property
    def fits(self) -> bool:
        """Whether the total is within the budget."""
        return bool(self._header["fits"])

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes of context, library, weights, state and workspace, in whole pages."""
        return dict(self._header["components"])

    @property
    def pools(self) -> Mapping[str, int]:
        """Bytes of every pool, in whole pages: workspace, weights, each state's (`state/NAME`), and pinned host memory."""
        return {pool["name"]: int(pool["capacity"]) for pool in self._header["pools"]}

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole request on the device."""
        return int(self._header["total_bytes"])

    @property
    def budget_bytes(self) -> int:
        """Bytes that the request may take."""
        return int(self._header["budget_bytes"])

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return int(self._header["host_bytes"])

    @property
    def host_budget_bytes(self) -> int:
        """Bytes of pinned host memory that the request may take."""
        return int(self._header["host_budget_bytes"])

    @property
    def peak_bytes(self) -> int:
        """Highest address in use in the workspace."""
        return int(self._header["peak_bytes"])

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes of the largest live set: no assignment can be below it."""
        return int(self._header["lower_bound_bytes"])

    @property
    def optimal(self) -> bool:
        """Whether the peak equals the lower bound."""
        return bool(self._header["optimal"])

    @property
    def max_ctx_tokens(self) -> int:
        """Largest context that fits the same device, budget and mask ratio."""
        return int(self._header["max_ctx_tokens"])

    @property
    def predicted_step_ms(self) -> float:
        """Predicted time of the step, milliseconds."""
        return float(self._header["predicted_step_ms"])

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
        """The timeline and the address map for notebooks, if matplotlib is installed."""
        from mosaic.errors import MissingExtra

        try:
            from mosaic.viz.charts import plan_png

            return plan_png(self.document)
        except MissingExtra:
            return None

    def to_json(self) -> str:
        """Return canonical JSON: byte-identical for identical input."""
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
            If the text is no JSON, no plan, or of an unknown schema.
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
        """Read a plan file and check its structure; `check` proves the rest."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanFormatError(f"cannot read the plan {path}: {error}.") from None
        try:
            plan = cls.from_json(text)
            require_well_formed(plan.document)
        except PlanFormatError as error:
            raise PlanFormatError(f"{path}: {error}") from None
        return plan

    def check(self, *, weights: WeightMap | None = None) -> tuple[str, ...]:
        """Prove the plan with the independent checker.

        Returns
        -------
        tuple of str
            The operators that Mosaic does not ship. The checker accepts their authors' claims unverified.

        Parameters
        ----------
        weights
            Where weights were loaded, in the form of `weights` of another plan: this plan must have them there.

        Raises
        ------
        CheckFailed
            Listing every violation.
        """
        require_valid(self.document, weights=weights)
        return unverified_operators(self.document)

    def prove(self, *, weights: WeightMap | None = None) -> None:
        """Prove the claims that memory safety depends on: faster than `check`. A planner does so for every plan.

        Raises
        ------
        CheckFailed
            Listing every violation.
        """
        require_safe(self.document, weights=weights)
