"""The safety part of the proof: in a plan that passes, no two live values share an address.

The skeleton, which no dim changes, is checked first; then the numbers of one plan. A planner reuses its `Records`
with other numbers: the skeleton is derived once for each and kept, from the records and by this room's own rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from mosaic.planner.check.claims import check_totals
from mosaic.planner.check.columns import Columns, Skeleton, Violation
from mosaic.planner.check.lifetimes import derive_lifetimes
from mosaic.planner.check.placement import (
    check_addresses,
    check_placement,
    check_pools,
    check_sizes,
    check_slices,
    mark_live,
    name_slices,
)
from mosaic.planner.check.reading import Numbers, Records, read_columns, read_header, read_skeleton
from mosaic.planner.check.streams import check_streams, order_streams
from mosaic.planner.check.structure import check_loops, check_ops, check_structure
from mosaic.planner.check.values import check_aliases, check_fills, check_roots, checked_gaps, derive_fills

_derived: Final[WeakKeyDictionary[Records, Skeleton]] = WeakKeyDictionary()
"""Skeletons by records; the violations of a skeleton are reported with each of its plans."""


def prove_safe(records: Records, header: Mapping[str, Any], numbers: Numbers) -> list[Violation]:
    """List what is unsafe in a plan, from the records and numbers that its document is written from.

    Parameters
    ----------
    records
        What dims do not change. Handed over again, the same object, it is not derived again.
    header
        All fields of the document but its lists; formula and trace may be missing.
    numbers
        What dims change, by columns.

    Returns
    -------
    list of Violation
        What `check_safety` finds in the document.
    """
    found: list[Violation] = []
    if read_header(header, found):
        proved_columns(records, header, numbers, found)
    return found


def proved_columns(
    records: Records, header: Mapping[str, Any], numbers: Numbers, found: list[Violation]
) -> Columns | None:
    """Read a plan whose header is sound and prove it safe; None if nothing further can be said of it."""
    skeleton = _skeleton_of(records, found)
    plan = None if skeleton is None else read_columns(skeleton, header, numbers, found)
    if plan is None:
        return None
    sound = check_loops(plan)
    if sound:
        check_numbers(plan)
    found.extend(plan.found)
    return plan if sound else None


def _skeleton_of(records: Records, found: list[Violation]) -> Skeleton | None:
    skeleton = _derived.get(records)
    if skeleton is None:
        own: list[Violation] = []
        skeleton = read_skeleton(records, own)
        if skeleton is None or not derive(skeleton):
            found.extend(own)
            return None
        _derived[records] = skeleton
    return skeleton


def derive(plan: Skeleton) -> bool:
    """Derive and check all that no dim changes; False if nothing could be derived."""
    if not check_structure(plan):
        return False
    check_ops(plan)
    name_slices(plan)
    derive_lifetimes(plan)
    derive_fills(plan)
    check_pools(plan)
    check_roots(plan)
    plan.holes = checked_gaps(plan)
    mark_live(plan)
    order_streams(plan)
    return True


def check_numbers(plan: Columns) -> None:
    """Check the numbers of one plan against its skeleton."""
    check_sizes(plan)
    check_slices(plan)
    check_placement(plan)
    check_fills(plan)
    check_aliases(plan)
    check_streams(plan, check_addresses(plan))
    check_totals(plan)
