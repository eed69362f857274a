"""One fault, and exactly the reasons for it: code, buffers, ops, and what the message says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plan_examples import EXAMPLES, KIB, Document, barrier

from mosaic.planner.check import check_plan, check_safety

Change = Callable[[Document], Any]
Reason = tuple[str, tuple[int, ...], tuple[int, ...], str]


def reshape(document: Document, b: int, **fields: Any) -> None:
    document["buffers"][b].update(fields)


def alias_elsewhere(document: Document) -> None:
    document["buffers"][4]["pool"] = "external"


def pool_unlisted(document: Document) -> None:
    document["pools"] = [pool for pool in document["pools"] if pool["name"] != "weights"]


def unit_too_small(document: Document) -> None:
    reshape(document, 2, alignment=256)


def unit_odd(document: Document) -> None:
    reshape(document, 2, alignment=1536)


def off_by_eight(document: Document) -> None:
    document["buffers"][2]["offset"] += 8


def cut_by(operand: str, axis: int, name: str, factor: int = 1) -> Change:
    return lambda document: document["ops"][1]["slices"].append([operand, axis, name, factor])


def home_of_outer_cut_by_inner(document: Document) -> None:
    """q is at home in the outer loop, so that the inner one goes over its whole extent of 3, not over 1."""
    document["ops"][3]["slices"].append(["r0", 0, "inner", 1])


# example, what to change, the reasons
FAULTS: list[tuple[str, Change, list[Reason]]] = [
    ("alias_group", alias_elsewhere, [("alias", (4, 1), (), "in pool 'external' is an alias in pool 'workspace'")]),
    ("alias_group", lambda d: reshape(d, 4, rotate=2), [
        ("alias", (1, 3, 4), (), "slots that rotate have no fixed address to share"),
        ("size", (4,), (), "size 2048, expected 4096"),
    ]),
    ("alias_group", lambda d: reshape(d, 4, offset=5 * KIB), [("alias", (4, 1), (), "is at 5120, its root")]),
    ("pools", unit_too_small, [("alignment", (2,), (), "alignment 256, in pool 'workspace' at least 512")]),
    ("pools", unit_odd, [("alignment", (), (), "alignment 1536 is not a power of two"), ("alignment", (2,), (), "offset 2048")]),
    ("pools", off_by_eight, [("alignment", (2,), (), "offset 2056 is not a multiple of 512")]),
    ("pools", pool_unlisted, [
        ("pool-bounds", (0, 4), (), "pool 'weights' is used but not listed"),
        ("pool", (), (), "pool 'weights' has None bytes"),
    ]),
    ("pools", lambda d: d["pools"][0].update(capacity=4 * KIB + 512), [
        ("pool-bounds", (), (), "is not a multiple of the page, 4096"), ("pool", (), (), "has 4608 bytes"),
    ]),
    ("pools", lambda d: d["pools"][1].update(capacity=4 * KIB), [
        ("pool-bounds", (4,), (), "ends at 5120, pool 'weights' has 4096 bytes"), ("pool", (), (), "has 4096 bytes"),
    ]),
    ("pools", lambda d: reshape(d, 2, pool="weights", offset=8 * KIB), [("pool", (2,), (), "kind 'transient' does not belong")]),
    ("chunked", cut_by("r0", 2, "ffn"), [("slice", (1,), (1,), "axis 2 of no axis by 'ffn': 1 x 5 expected")]),
    ("chunked", cut_by("r0", 1, "ffn", 2), [("slice", (1,), (1,), "axis 1 of 256 by 'ffn': 2 x 5 expected")]),
    ("chunked", cut_by("r7", 0, "ffn"), [("slice", (), (1,), "r7[0] by 'ffn': no such operand")]),
    ("chunked", cut_by("r0", 1, "rows"), [("slice", (), (1,), "r0[1] by 'rows': no region around it")]),
    ("chunked", cut_by("r0", 0, "ffn"), [("slice", (), (1,), "slices one axis of an operand twice")]),
    ("nested", home_of_outer_cut_by_inner, [("slice", (2,), (3,), "axis 0 of 2 by 'inner': 1 x 3 expected")]),
    ("gap", lambda d: reshape(d, 0, gaps=[[0, 1]]), [("gap", (0,), (), "op 0 'first' touches buffer 0 'x'")]),
    ("gap", lambda d: reshape(d, 1, gaps=[[4, 2]]), [("gap", (1,), (), "gap [4, 2) is empty")]),
    ("pools", lambda d: reshape(d, 3, gaps=[[2, 3]], kind="state"), [("gap", (3,), (), "handed on at the end of the step")]),
]  # fmt: skip


# Of structure, and of statements that only the whole check looks at.
WHOLE: list[tuple[str, Change, list[Reason]]] = [
    ("chunked", lambda d: reshape(d, 2, region="nowhere"), [("region", (2,), (), "unknown region 'nowhere'")]),
    ("chunked", lambda d: d["regions"][0].update(count=2), [("region", (), (), "2 chunks of 2 rows do not cover 5")]),
    ("chunked", lambda d: d["barriers"][0].update(start=9, end=9), [("barrier-mismatch", (), (), "covers no op: [9, 9)")]),
    ("chain", lambda d: d["ops"][1].update(inplace=[[2, 0]]), [("operands", (2, 0), (1,), "2 is not written or 0 not read")]),
    ("step", lambda d: d["ops"][1].update(inplace=[[11, 10]]), [
        ("operands", (11, 10), (1,), "linear does not write buffer 11 'q' over buffer 10"),
    ]),
    ("step", lambda d: d["ops"][1]["reads"].remove(4), [("operands", (4,), (1,), "reads [10], its operands are [4, 10]")]),
    ("step", lambda d: d.update(dtype="int8"), [("dtype", (), (), "is said to be in 'int8', its weights are: ")]),
    ("chunked", lambda d: d["config"].clear(), [("config", (), (), "has 2 rows, config says ffn='nothing'")]),
    ("chunked", lambda d: d["config"].update(ffn=3), [("config", (), (), "has 2 rows, config says ffn=3")]),
    ("chunked", lambda d: d["config"].update(more=3), [("config", (), (), "more: rows without a region")]),
    ("chunked", lambda d: d["dims"].pop("ffn"), [("dims", (), (), "runs over 5 ffn, dims say 'nothing'")]),
    ("step", lambda d: d["implementations"].clear(), [
        ("implementation", (), (), "chosen for nothing, on cuda the graph needs attention"),
    ]),
    ("chain", lambda d: d["implementations"].update(linear="x"), [
        ("implementation", (), (), "chosen for linear, on cuda the graph needs none"),
        ("implementation", (), (), "linear has no 'x'; known: none"),
    ]),
    ("step", lambda d: d["mesh"].update(size=2), [("mesh", (), (), "2 devices in axes")]),
    ("step", lambda d: d.update(device_memory_bytes=8 * KIB), [("device", (), (), "8192 bytes of memory, context")]),
]  # fmt: skip


def test_a_loop_over_one_row_is_a_loop() -> None:
    document = EXAMPLES["nested"]()
    document["regions"][1].update(extent=1, rows=1, count=1)
    assert check_safety(document) == []


@pytest.mark.parametrize("number", range(len(FAULTS) + len(WHOLE)))
def test_a_fault_has_its_reasons(number: int) -> None:
    name, change, reasons = (*FAULTS, *WHOLE)[number]
    document = EXAMPLES[name]()
    change(document)
    found = check_safety(document) if number < len(FAULTS) else check_plan(document)
    for code, buffers, ops, text in reasons:
        assert any(
            (violation.code, violation.buffers, violation.ops) == (code, buffers, ops) and text in violation.message
            for violation in found
        ), (code, list(map(str, found)))


@pytest.mark.parametrize("kind", ["input", "carry", "host"])
def test_values_that_are_there_from_the_start_are_lost_too(kind: str) -> None:
    """What a step is handed is overwritten by an alias, and read after that."""
    document = EXAMPLES["alias_group"]()
    reshape(document, 1, kind=kind)
    document["ops"][0].update(writes=[], operands={"r0": 0})
    document["ops"][4]["reads"].append(1)
    document["ops"][4]["operands"]["r9"] = 1
    found = check_safety(document)
    assert (4,) in [violation.ops for violation in found if violation.code == "alias-stale-read"]


def test_a_barrier_holds_from_its_first_op_on() -> None:
    """Attention overwrites its queries as it reads them for the last time: not where they are held beyond it."""
    for start, end, held in ((0, 4, True), (2, 4, True), (2, 3, False), (3, 4, False), (0, 3, False)):
        document = EXAMPLES["inplace"]()
        document["barriers"].append(barrier("keep q", (start, end), inputs=[1]))
        stale = [violation for violation in check_safety(document) if violation.code == "alias-stale-read"]
        assert bool(stale) == held, (start, end)


def test_sizes_are_rounded_where_the_plan_places() -> None:
    """An external buffer may have just its bytes; what the plan places has whole units."""
    document = EXAMPLES["pools"]()
    reshape(document, 4, pool="external", shape=[3, 7], size=84)
    assert "size" not in {violation.code for violation in check_safety(document)}
    reshape(document, 4, pool="weights")
    assert "size" in {violation.code for violation in check_safety(document)}
