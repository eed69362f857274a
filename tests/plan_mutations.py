"""Ways to break a plan document, each of which the checker must refuse.

A mutation takes a valid document and `pick`, a choice from a list (`random.Random(0).choice`, or hypothesis's). It
returns a broken copy and a code that is among the checker's reasons, or None where the document offers nothing to break
this way. A mutation that could leave a valid plan, such as moving a buffer into free space, is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mutations import claims, layout, operators, streams
from mutations.choosing import Mutation, settle_totals

__all__ = ["MUTATIONS", "settle_totals"]

MUTATIONS: Mapping[str, Mutation] = {
    mutate.__name__: mutate for room in (layout, streams, claims, operators) for mutate in room.MUTATIONS
}
