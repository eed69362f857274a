"""Prove a plan, sharing no code with the planner: from its JSON document alone, or from the planner's records of it.

Three levels. *Safety*, all that memory depends on, is checked of every plan before a planner hands it out: `lifetimes`,
`placement`, `values` and `streams`, put together in `safety`, which begins with regions, operands and edges. *Operators*: shapes,
dtypes, FLOPs and bytes of the kernels that Mosaic ships (`launches`, by the letters of `operators`). *Statements*: formula
and search steps of `claims`, and `settings`. `check_plan` checks all three; `unproved` lists what a document says beyond
them. `reading` turns a document, or a planner's records and numbers, into `columns`. `weights` compares a plan with where
weights were loaded, which no file says.

Rulings where the rules leave a choice; each takes the safe side:

- A `carry` that is read before it is written holds its value from op 0; one that is written lives to the end. A `host`
  buffer that is never written is a constant and lives throughout; one that is written holds no value before. An `input`
  that no op touches lives one op, `[0, 1)`.
- A buffer is touched only inside its home region. One that is carried through it may be read before it is written (the
  kernel knows the first iteration), but some op must write it, and it must have one slot; it is carried through all
  enclosing regions as well.
- Slices that a loop writes are a whole value when the loop has ended. In it, an op reads no more than the slices written so
  far, unless the buffer was written before the loop. A carry may hold a value from op 0, so it is not asked.
- A gap holds no access and no part of an explicit barrier or of a side stream's window. What comes first after it, also
  on the way round a loop, overwrites the whole buffer. Lower bound and overlap leave gaps out; a root's gaps bind its
  aliases.
- `inplace` permits only an overwrite at the same address and of the same number of bytes, and of shipped operators only
  what they say they may overwrite. Members of an alias group
  that share bytes must hold their value when read, in each iteration of a loop; what the step hands on, at its end.
- Outside of loops, a side op holds what it touches from its fork to its join; one that is never joined touches nothing in
  the workspace. In a loop, it holds that over the whole loop: its stream is forked where the loop begins and joined
  where it ends, and iterations overlap (module `streams` has the rules). Then what it touches is at home in that very
  loop, with two slots or more and no aliases; or outside the workspace, where it is either not written in the loop or
  sliced by it, alike in all ops. That does not bind side ops of a loop that runs once, nor side ops that the edges of the
  same iteration both fork and join.
- Reads and writes of one value on two streams are ordered by edges or the borders of loops, too, and rotating slots
  exempt nothing from that. An edge out of a loop goes on from its last iteration, one into it is waited for in the first.
- The shape of a buffer that rotates is one slot's; its size is that of all slots, each rounded up to the alignment. It
  shares its storage with no alias.
- `operands` names each buffer of `reads` and `writes`, scratch included (scratch is written).
- A pool `state/NAME` or `carry/NAME` holds the state or carry of that name, from its first byte, and no other root: what grows
  moves nothing else, and all plans have it at the same address.
- Explicit barriers that stretch nothing are allowed: they promise more and break nothing.
- Shapes, attributes, FLOPs and bytes of the shipped operators follow from the letters of `operators`; kernels that are
  not there are their author's word. Inside a loop an axis is either a sliced multiple of the loop's rows or constant. A
  shipped operator has at most one operand in host memory, and only where its kernel reaches through the link.
- Each line of the formula is compared with what is live at its op: the sum before rounding, so at most that, and at
  least that less what rounding (and in an alias group the storage beyond the smallest member) adds. The largest line
  reaches the lower bound up to the same slack.
- In the phase `full_step`, which Mosaic ships, each dim must be the length of an input or of a state, but for `span`, the keys
  that a query sees on average, and `kv_heads`; elsewhere dims are free.
- A JSON `true` where an integer belongs counts as 1.

What no file can prove alone, `unproved_claims` lists for a document. It is checked for form, and where it repeats itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import CheckFailed, PlanFormatError
from mosaic.planner.check.claims import check_formula, check_trace
from mosaic.planner.check.columns import Columns, Violation
from mosaic.planner.check.launches import check_launches
from mosaic.planner.check.reading import Numbers, Records, read_columns, read_document, read_skeleton, read_statements
from mosaic.planner.check.safety import prove_safe, proved_columns
from mosaic.planner.check.settings import check_settings
from mosaic.planner.check.unproved import Unproved, unproved_claims, unverified_operators
from mosaic.planner.check.weights import WeightMap, check_weights, weight_map

__all__ = [
    "SCHEMA",
    "Numbers",
    "Records",
    "Unproved",
    "Violation",
    "WeightMap",
    "check_plan",
    "check_safety",
    "prove_safe",
    "require_safe",
    "require_valid",
    "require_well_formed",
    "unproved_claims",
    "unverified_operators",
    "weight_map",
]

SCHEMA: Final = "mosaic.plan/1"


def check_plan(document: Mapping[str, Any], *, weights: WeightMap | None = None) -> list[Violation]:
    """List the claims of a plan that do not hold; an empty list is a valid plan, but for its `unproved_claims`.

    Parameters
    ----------
    document
        A plan as its JSON reads, schema 'mosaic.plan/1'. It is not written.
    weights
        Where weights were loaded (`weight_map` of the plan that loaded them): the plan must read them there, and have
        nothing else there.

    Returns
    -------
    list of Violation
        In a fixed order. A malformed document yields only 'format', 'id' and 'region' violations: nothing can be
        derived from it.

    Raises
    ------
    PlanFormatError
        If the document is no plan or of another schema.

    Examples
    --------
    >>> [violation.code for violation in check_plan({"schema": "mosaic.plan/1"})][:2]
    ['format', 'format']
    """
    found: list[Violation] = []
    plan = _proved(document, found)
    malformed: list[Violation] = []
    work = read_statements(document, malformed)
    found.extend(malformed)
    if plan is None or work is None:
        return found
    plan.found = found
    check_launches(plan, work)
    check_formula(plan)
    check_trace(plan)
    check_settings(plan)
    if weights is not None:
        check_weights(plan, weights)
    return found


def check_safety(document: Mapping[str, Any], *, weights: WeightMap | None = None) -> list[Violation]:
    """List violations of a plan's memory safety, not of claims on operators, times and the search; see `check_plan`.

    Examples
    --------
    >>> check_safety({"schema": "mosaic.plan/1"})[0].code
    'format'
    """
    found: list[Violation] = []
    plan = _proved(document, found)
    if plan is not None and weights is not None:
        plan.found = found
        check_weights(plan, weights)
    return found


def _proved(document: Mapping[str, Any], found: list[Violation]) -> Columns | None:
    """Read a document and prove it safe; None if nothing further can be said of it."""
    _refuse_other_schemas(document)
    parts = read_document(document, found)
    return None if parts is None else proved_columns(parts[0], document, parts[1], found)


def require_valid(document: Mapping[str, Any], *, weights: WeightMap | None = None) -> None:
    """Raise `CheckFailed`, with every violation's text, if `check_plan` finds any.

    Examples
    --------
    >>> require_valid({"schema": "mosaic.plan/2"})
    Traceback (most recent call last):
        ...
    mosaic.errors.PlanFormatError: expected schema 'mosaic.plan/1', got 'mosaic.plan/2'; plan again with this version
    """
    violations = check_plan(document, weights=weights)
    if violations:
        raise CheckFailed(map(str, violations))


def require_safe(document: Mapping[str, Any], *, weights: WeightMap | None = None) -> None:
    """Raise `CheckFailed`, with every violation's text, if `check_safety` finds any: the plan is unsafe to run."""
    violations = check_safety(document, weights=weights)
    if violations:
        raise CheckFailed(map(str, violations))


def require_well_formed(document: Mapping[str, Any]) -> None:
    """Raise if a document cannot be read as a plan; whether its claims hold is left to `check_plan`.

    Raises
    ------
    PlanFormatError
        If the document is of another schema, or a field is missing, of a wrong type or out of range.

    Examples
    --------
    >>> require_well_formed({"schema": "mosaic.plan/1"})
    Traceback (most recent call last):
        ...
    mosaic.errors.PlanFormatError: not a plan: missing mosaic_version (and 32 more)
    """
    _refuse_other_schemas(document)
    found: list[Violation] = []
    parts = read_document(document, found)
    skeleton = None if parts is None else read_skeleton(parts[0], found)
    if parts is not None and skeleton is not None:
        read_columns(skeleton, document, parts[1], found)
    read_statements(document, found)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PlanFormatError(f"not a plan: {found[0].message}{more}")


def _refuse_other_schemas(document: Mapping[str, Any]) -> None:
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if schema != SCHEMA:
        raise PlanFormatError(f"expected schema '{SCHEMA}', got {schema!r}; plan again with this version")
