"""One fault, and exactly the reasons for it: code, buffers, ops, and what the message says of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from plan_examples import EXAMPLES, KIB, Document, barrier, buffer
from plan_launches import LAUNCHES, Launch, launched, looped, resettled
from plan_random import put

from mosaic.errors import PlanFormatError
from mosaic.planner.check import check_plan, check_safety, require_well_formed
from mosaic.registrar.operators import OPERATORS

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
    ("pools", lambda d: d["pools"].append({"name": "heap", "device": "cpu", "capacity": 0}), [
        ("pool", (), (), "unknown pool 'heap'; known: carry/NAME, external, host, state/NAME, weights, workspace"),
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
    ("chunked", lambda d: d["regions"][0].update(start=-1), [("region", (), (), "region 'ffn' covers no op: [-1, 4) of 5")]),
    ("chunked", lambda d: d["regions"][0].update(end=6), [("region", (), (), "region 'ffn' covers no op: [1, 6) of 5")]),
    ("chunked", lambda d: d["barriers"][0].update(start=-1), [("barrier-mismatch", (), (), "covers no op: [-1, 4)")]),
    ("step", lambda d: [d["ops"][i].update(flops=1) for i in (2, 3)], [
        ("flops", (), (i,), "1 FLOPs, 2*T*I*O is") for i in (2, 3)
    ]),
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


def test_a_plan_without_a_workspace_has_no_peak() -> None:
    document = launched(BY_KERNEL["copy"])
    for row in document["buffers"]:
        row["pool"] = "external"
    assert check_plan(resettled(document)) == []
    assert (document["peak_bytes"], document["lower_bound_bytes"], document["optimal"]) == (0, 0, True)


def test_an_op_whose_slices_do_not_fit_says_nothing_of_shapes() -> None:
    document = looped(BY_KERNEL["copy"])
    document["ops"][0]["slices"][0][3] = 2
    assert codes(document) == {"slice"}
    document["ops"][0]["slices"][0][2:] = ["elsewhere", 1]
    assert codes(document) == {"slice"}


@pytest.mark.parametrize("kind", ["input", "carry", "host"])
def test_values_that_are_there_from_the_start_are_lost_too(kind: str) -> None:
    """A step's input is overwritten by an alias, and read after that."""
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


# What stands in a field: types and ranges, of a document that is otherwise sound.

FORMS: dict[str, Any] = {"int": 3, "str": "x", "list": [], "dict": {}, "bool": True, "float": 0.5, "null": None}
FIELDS = {
    "": {
        "mosaic_version model phase dtype device backend solver": "str",
        "dims mesh implementations config components": "dict", "estimated fits optimal": "bool",
        "device_memory_bytes page_bytes budget_bytes host_budget_bytes total_bytes host_bytes peak_bytes "
        "lower_bound_bytes max_ctx_tokens": "int",
        "pools regions barriers edges ops buffers formula trace": "list or tuple", "predicted_step_ms": "float or int",
    },
    "pools": {"name device": "str", "capacity": "int"},
    "regions": {"name knob dim": "str", "start end extent rows count": "int", "parent": "null or str"},
    "barriers": {"name": "str", "region": "null or str", "start end": "int", "inputs outputs carried": "list or tuple"},
    "formula": {"expr at": "str"},
    "trace": {"config": "dict", "move bottleneck": "str", "peak_bytes total_bytes": "int", "predicted_ms": "float or int"},
    "edges": {"kind": "str", "from to": "int"},
    "ops": {
        "index flops bytes": "int", "name kernel stream": "str", "region": "null or str", "operands attrs": "dict",
        "reads writes inplace slices": "list or tuple",
    },
    "buffers": {
        "id offset size alias_offset start end alignment rotate": "int", "name kind pool dtype": "str",
        "shape gaps": "list or tuple", "alias_of": "int or null", "region tensor": "null or str",
    },
}  # fmt: skip


def text_of(document: Document) -> list[str]:
    return [violation.message for violation in check_plan(document) if violation.code == "format"]


def with_rows(label: str) -> Document:
    """A sound plan that has rows of a list."""
    return EXAMPLES["streamed" if label == "edges" else "step"]()


@pytest.mark.parametrize("label", FIELDS)
def test_every_field_has_its_type(label: str) -> None:
    """Each field, with a value of each type that it may not have: one message, which says what it may have."""
    for names, allowed in FIELDS[label].items():
        for name, form in product(names.split(), FORMS):
            document = with_rows(label)
            row = document[label][-1] if label else document
            row[name] = value = FORMS[form]
            if form in allowed.split(" or "):
                assert not any(text.startswith(f"{name}: expected {allowed}") for text in text_of(document))
            elif label and (allowed, form) == ("int", "bool"):
                assert not any("expected int," in text for text in text_of(document))  # `true` counts as 1
            else:
                at = f"{label}[{len(document[label]) - 1}].{name}" if label else name
                got = repr(value) if label else type(value).__name__
                assert text_of(document) == [f"{at}: expected {allowed}, got {got}"]


@pytest.mark.parametrize("label", FIELDS)
def test_every_field_is_there(label: str) -> None:
    names = [name for names in FIELDS[label] for name in names.split()]
    for name in names:
        document = with_rows(label)
        del (document[label][-1] if label else document)[name]
        at = f"{label}[{len(document[label]) - 1}]: missing {name}" if label else f"missing {name}"
        assert text_of(document) == [at]
    if label:
        document = with_rows(label)
        document[label][0] = 7
        assert f"{label}: every entry must be an object" in text_of(document)


def test_missing_fields_are_listed_row_by_row() -> None:
    document = EXAMPLES["step"]()
    del document["ops"][1]["name"], document["ops"][1]["slices"], document["ops"][3]["index"]
    assert text_of(document) == ["ops[1]: missing name, slices", "ops[3]: missing index"]


BUFFERS, OPS, ENDS, NONE = "buffers", "ops", "ends", "none"
BOUNDED: list[tuple[str, str, tuple[Any, ...], str]] = [  # label, example, where, below what
    ("ops.reads and ops.writes", "chain", ("ops", 0, "reads", 0), BUFFERS),
    ("ops.reads and ops.writes", "chain", ("ops", 0, "writes", 0), BUFFERS),
    ("ops.operands", "chain", ("ops", 0, "operands", "r0"), BUFFERS),
    ("ops.inplace", "inplace", ("ops", 2, "inplace", 0, 0), BUFFERS),
    ("ops.inplace", "inplace", ("ops", 2, "inplace", 0, 1), BUFFERS),
    ("buffers.alias_of", "inplace", ("buffers", 3, "alias_of"), BUFFERS),
    ("barriers", "carried", ("barriers", 0, "inputs", 0), BUFFERS),
    ("barriers", "carried", ("barriers", 0, "outputs", 0), BUFFERS),
    ("barriers", "carried", ("barriers", 0, "carried", 0), BUFFERS),
    ("edges", "streamed", ("edges", 0, "from"), OPS),
    ("edges", "streamed", ("edges", 0, "to"), OPS),
    ("buffers.start and buffers.end", "chain", ("buffers", 0, "start"), ENDS),
    ("buffers.start and buffers.end", "chain", ("buffers", 0, "end"), ENDS),
    ("buffers.gaps", "gap", ("buffers", 1, "gaps", 0, 0), ENDS),
    ("buffers.gaps", "gap", ("buffers", 1, "gaps", 0, 1), ENDS),
    ("buffers.shape", "chain", ("buffers", 0, "shape", 1), NONE),
    ("buffers.offset", "chain", ("buffers", 0, "offset"), NONE),
    ("buffers.size", "chain", ("buffers", 0, "size"), NONE),
    ("buffers.alias_offset", "chain", ("buffers", 0, "alias_offset"), NONE),
    ("regions", "chunked", ("regions", 0, "extent"), NONE),
    ("regions", "chunked", ("regions", 0, "rows"), NONE),
    ("regions", "chunked", ("regions", 0, "count"), NONE),
    ("pools.capacity", "chain", ("pools", 0, "capacity"), NONE),
    ("components", "chain", ("components", "context"), NONE),
    ("trace.peak_bytes", "step", ("trace", 0, "peak_bytes"), NONE),
    ("trace.total_bytes", "step", ("trace", 0, "total_bytes"), NONE),
    ("ops.flops", "chain", ("ops", 0, "flops"), NONE),
    ("ops.bytes", "chain", ("ops", 0, "bytes"), NONE),
    *((key, "chain", (key,), NONE) for key in (
        "budget_bytes", "host_budget_bytes", "total_bytes", "host_bytes", "peak_bytes", "lower_bound_bytes",
        "max_ctx_tokens", "device_memory_bytes",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("label", "example", "path", "below"), BOUNDED)
def test_numbers_are_in_their_ranges(label: str, example: str, path: tuple[Any, ...], below: str) -> None:
    """Refused from one below the range to one above it, and not at its borders."""

    def texts(value: object) -> list[str]:
        document = EXAMPLES[example]()
        put(document, path, value)
        return text_of(document)

    document = EXAMPLES[example]()
    limit = {BUFFERS: len(document["buffers"]), OPS: len(document["ops"]), ENDS: len(document["ops"]) + 1, NONE: 0}[
        below
    ]
    range_ = f"{label}: expected 0 or more{f' and below {limit}' if limit else ''}, got "
    (negative,) = texts(-1)
    assert negative.startswith(f"{range_}-1 to ")
    assert texts(0) == []
    if limit:
        (above,) = texts(limit)
        assert above.startswith(range_) and above.endswith(f" to {limit}")
        assert texts(limit - 1) == []
    else:
        assert texts(1 << 70) == []
    if type(path[-1]) is int or path[-2:-1] == ("operands",) or path[0] == "components":
        assert texts("x") == [f"{label}: expected integers"]


MESHES: tuple[Any, ...] = (
    {}, {"size": 1}, {"axes": {"tensor": 1}}, {"size": 0, "axes": {}}, {"size": 1, "axes": {"tensor": 0}},
    {"size": 1, "axes": [1]}, {"size": True, "axes": {}},
)  # fmt: skip
MISFITS: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("chunked", ("ops", 1, "slices", 0), ["r0", 0, "ffn"], "ops.slices: every entry must be [operand, axis, region, factor]"),
    ("chunked", ("ops", 1, "slices", 0), "r0ff", "ops.slices: every entry must be [operand, axis, region, factor]"),
    ("inplace", ("ops", 2, "inplace", 0), [3], "ops.inplace: every entry must be a pair"),
    ("inplace", ("ops", 2, "inplace", 0), [3, 1, 1], "ops.inplace: every entry must be a pair"),
    ("gap", ("buffers", 1, "gaps", 0), [2], "buffers.gaps: every entry must be a pair"),
    *(("chunked", ("ops", 1, "slices", 0, at), value, "ops.slices: expected [operand, axis from 0, region, factor from 1]")
      for at, value in ((0, 3), (1, -1), (1, "x"), (2, None), (3, 0), (3, "x"))),
    ("chain", ("ops", 0, "attrs", "x"), None, "ops.attrs: expected numbers, strings and booleans"),
    ("chain", ("ops", 0, "attrs", "x"), [], "ops.attrs: expected numbers, strings and booleans"),
    ("chain", ("buffers", 0, "kind"), "cache", "buffers.kind: unknown 'cache'; known: carry, external, host, input, "
     "output, scratch, state, transient, weight"),
    ("chain", ("buffers", 0, "pool"), "heap", "buffers.pool: unknown 'heap'; known: carry/NAME, external, host, state/NAME, "
     "weights, workspace"),
    ("chain", ("buffers", 0, "dtype"), "int4", "buffers.dtype: unknown 'int4'; known: bfloat16, bool, float16, float32, "
     "float64, float8_e4m3fn, float8_e5m2, int16, int32, int64, int8, uint8"),
    ("chain", ("buffers", 0, "alignment"), 0, "alignment: expected 1 or more, got 0"),
    ("chain", ("buffers", 0, "rotate"), -1, "rotate: expected 1 or more, got -1"),
    *(("chain", ("dims", "tokens"), value, f"dims.tokens: expected an integer from 1, got {value!r}")
      for value in (0, "x", True, 1.0)),
    *(("chain", ("mesh",), mesh, f"mesh: expected a size and axes from 1, got {mesh!r}") for mesh in MESHES),
    *(("chain", ("config",), {"ffn": value}, f"config: expected rows, null or an option, got {{'ffn': {value!r}}}")
      for value in (True, 0.5, (1,))),
    ("chain", ("config",), {"ffn": 0, "idle": None}, "config: expected rows from 1, got {'ffn': 0, 'idle': None}"),
    ("step", ("trace", 0, "config"), {"ffn": 0}, "config: expected rows from 1, got {'ffn': 0}"),
    ("chain", ("implementations",), {"linear": 3}, "implementations: expected names, got 3"),
    *((example, path, time, f"{label}: expected a finite time from 0, got {time!r}")
      for example, path, label in (
        ("chain", ("predicted_step_ms",), "predicted_step_ms"), ("step", ("trace", 0, "predicted_ms"), "trace.predicted_ms"),
    ) for time in (-0.5, float("inf"), float("nan"))),
    ("chain", ("components",), {"context": 0}, "components: expected context, library, weights, state, workspace, got context"),
    ("chain", ("page_bytes",), 0, "page_bytes: expected 1 or more, got 0"),
    ("chain", ("backend",), "tpu", "backend: unknown 'tpu'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MISFITS)))
def test_what_lies_inside_a_field(number: int) -> None:
    example, path, value, text = MISFITS[number]
    document = EXAMPLES[example]()
    put(document, path, value)
    assert text_of(document) == [text]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("page_bytes",), 1), (("predicted_step_ms",), 0), (("config", "ffn"), 1), (("mesh", "axes"), {}),
        (("mesh", "axes"), {"tensor": 1, "data": 1}), (("dims", "ffn"), 1), (("buffers", 2, "alignment"), 1),
        (("ops", 1, "attrs"), {"a": 1, "b": 0.5, "c": "x", "d": True}), (("config", "more"), "option"),
        (("ops", 1, "slices"), ()), (("buffers", 2, "shape"), (2, 256)),
    ],
)  # fmt: skip
def test_what_is_at_the_border_is_well_formed(path: tuple[Any, ...], value: object) -> None:
    document = EXAMPLES["chunked"]()
    put(document, path, value)
    assert text_of(document) == []


@pytest.mark.parametrize("label", ["ops", "buffers", "regions", "pools"])
def test_names_are_unique(label: str) -> None:
    document = EXAMPLES["offloaded"]()
    first, second = (row["name"] for row in document[label][:2])
    document[label].append(dict(document[label][0]))
    document[label].append(dict(document[label][1]))
    for k, row in enumerate(document[label]):
        row.update({key: k for key in ("id", "index") if key in row})
    found = [violation for violation in check_plan(document) if violation.code == "duplicate-name"]
    listed = ", ".join(map(repr, sorted((first, second))))
    assert [str(violation) for violation in found] == [f"duplicate-name: {label}: {listed} more than once"]


@pytest.mark.parametrize(
    ("label", "key", "text"), [("ops", "index", "ops[i].index must be i"), ("buffers", "id", "buffers[i].id must be i")]
)
def test_rows_are_numbered(label: str, key: str, text: str) -> None:
    document = EXAMPLES["chain"]()
    document[label][1][key] = 2
    assert list(map(str, check_plan(document))) == [f"id: {text}"]


def test_a_refusal_counts_what_it_does_not_say() -> None:
    document = EXAMPLES["chunked"]()
    document["backend"] = "tpu"
    with pytest.raises(PlanFormatError, match=r"^not a plan: backend: unknown 'tpu'$"):
        require_well_formed(document)
    document["page_bytes"] = 0
    document["trace"] = [1]
    with pytest.raises(PlanFormatError, match=r"^not a plan: page_bytes: .* got 0 \(and 2 more\)$"):
        require_well_formed(document)
    document = EXAMPLES["chunked"]()
    document["buffers"][0]["shape"] = ["x"]
    with pytest.raises(PlanFormatError, match=r"^not a plan: buffers.shape: expected integers$"):
        require_well_formed(document)
    document["buffers"][0]["gaps"] = [7]
    with pytest.raises(PlanFormatError, match=r"^not a plan: buffers.gaps: every entry must be a pair$"):
        require_well_formed(document)
    for unlike in ("chain", {}, None, {"schema": "mosaic.plan/2"}):
        with pytest.raises(PlanFormatError, match=r"^expected schema 'mosaic.plan/1', got "):
            require_well_formed(unlike)  # type: ignore[arg-type]


# Every shipped operator: a launch of it, and what it may not be.

BY_KERNEL = {launch.kernel: launch for launch in LAUNCHES}
ALIKE = {"float32": "int32", "int32": "float32", "int64": "float64", "uint8": "bool"}  # as many bytes


def codes(document: Document) -> set[str]:
    return {violation.code for violation in check_plan(document)}


def names_of(launch: Launch) -> dict[str, int]:
    operands: dict[str, int] = launched(launch)["ops"][0]["operands"]
    return operands


def test_every_shipped_operator_has_a_launch() -> None:
    """The registrar's list: a kernel that it knows and the checker does not would pass unproved."""
    assert BY_KERNEL.keys() == {*OPERATORS}


@pytest.mark.parametrize("kernel", BY_KERNEL)
def test_a_launch_says_what_it_computes_and_moves(kernel: str) -> None:
    launch = BY_KERNEL[kernel]
    assert check_plan(launched(launch)) == []
    for key, noun in (("flops", "FLOPs, "), ("bytes", "bytes, its operands have ")):
        for change in (-1, 1):
            document = launched(launch)
            true = document["ops"][0][key]
            document["ops"][0][key] = max(0, true + change)
            if true + change >= 0:
                (found,) = check_plan(document)
                assert (found.code, found.buffers, found.ops) == (key, (), (0,))
                assert found.message.startswith(f"op 0 'launch': {true + change} {noun}")
                assert found.message.endswith(f" {true}")


@pytest.mark.parametrize("kernel", BY_KERNEL)
def test_a_launch_in_a_loop(kernel: str) -> None:
    """Sliced operands move once, others in every iteration; some operators need all rows at once."""
    launch = BY_KERNEL[kernel]
    if not launch.sliced:
        return
    document = looped(launch)
    if launch.whole:
        (found,) = [violation for violation in check_plan(document) if violation.code == "operator"]
        assert found.message == f"op 0 'launch': {kernel} needs all of {launch.whole}, it sees [4 by 'rows']"
        return
    assert check_plan(document) == []
    for k, (name, *_) in enumerate(document["ops"][0]["slices"]):
        document = looped(launch)
        del document["ops"][0]["slices"][k]
        assert codes(document) & {"operator", "flops", "bytes"}, name


@pytest.mark.some
@pytest.mark.parametrize("kernel", BY_KERNEL)
def test_operands_have_their_dtypes_shapes_and_places(kernel: str) -> None:
    launch = BY_KERNEL[kernel]
    for name, b in names_of(launch).items():
        document = launched(launch)
        row = document["buffers"][b]
        row["dtype"] = ALIKE[row["dtype"]]
        assert codes(document) == (set() if name in launch.free.split() else {"operator"}), (name, "dtype")

        for axis in range(len(row["shape"])):
            document = launched(launch)
            document["buffers"][b]["shape"][axis] += 1
            loose = axis == 0 and name in launch.loose.split()
            assert (codes(resettled(document)) & {"operator", "flops", "bytes"} == set()) == loose, (name, axis)

        document = launched(launch)
        document["buffers"][b]["shape"].insert(0, 1)
        assert codes(document) == (set() if name in launch.any_rank.split() else {"operator"}), (name, "rank")

        document = launched(launch)
        kind = "host" if document["buffers"][b]["kind"] != "input" else "input"
        document["buffers"][b].update(pool="host", kind=kind)
        if kind == "input" or b not in document["ops"][0]["reads"]:
            found = [violation for violation in check_plan(resettled(document)) if violation.code == "operator"]
            assert (not found) == (name in launch.host.split()), (name, "host")
            may = f"one of {', '.join(sorted(launch.host.split()))}" if launch.host else "none"
            for violation in found:
                assert (
                    violation.message == f"op 0 'launch': {kernel} has {name} in host memory; it may have {may} there"
                )
                assert violation.buffers == (b,)


@pytest.mark.some
@pytest.mark.parametrize("kernel", BY_KERNEL)
def test_operands_and_attributes_are_all_there(kernel: str) -> None:
    launch = BY_KERNEL[kernel]
    optional = launch.optional.split()
    for name, b in names_of(launch).items():
        document = launched(launch)
        row = document["ops"][0]
        del row["operands"][name]
        for side in ("reads", "writes"):
            row[side] = [at for at in row[side] if at != b]
        row["bytes"] = launched(launch)["ops"][0]["bytes"]
        expected = {"bytes" if name in optional else "operator"}
        assert codes(document) & {"operator", "operands", "flops", "bytes"} == expected, name
        for side in ("reads", "writes"):
            document = launched(launch)
            if b in document["ops"][0][side]:
                document["ops"][0][side].remove(b)
                assert "operands" in codes(document), (name, side)
    for name, value in launch.attrs.items():
        document = launched(launch)
        del document["ops"][0]["attrs"][name]
        found = [violation.message for violation in check_plan(document) if violation.code == "operator"]
        assert (found == []) == (name in optional), name
        assert all(text.endswith(f"; amiss: {name}=None") for text in found)
        document = launched(launch)
        wrong = "x" if not isinstance(value, str) else 1
        document["ops"][0]["attrs"][name] = wrong
        found = [violation.message for violation in check_plan(document) if violation.code == "operator"]
        assert [text.partition("; ")[2] for text in found] == [f"amiss: {name}={wrong!r}"], name
    document = launched(launch)
    document["ops"][0]["attrs"]["colour"] = 1
    (violation,) = check_plan(document)
    assert violation.message.endswith("; amiss: colour=1")
    document = launched(launch)
    document["ops"][0]["operands"]["colour"] = 0
    assert "operator" in codes(document)


@pytest.mark.parametrize("kernel", BY_KERNEL)
def test_what_an_operator_overwrites_in_place(kernel: str) -> None:
    launch = BY_KERNEL[kernel]
    operands = names_of(launch)
    row = launched(launch)["ops"][0]
    for (new, a), (old, b) in product(operands.items(), operands.items()):
        if a in row["writes"] and b in row["reads"] and a != b:
            document = launched(launch)
            document["ops"][0]["inplace"] = [[a, b]]
            allowed = f"{new}/{old}" in launch.inplace.split()
            assert codes(document) == (set() if allowed else {"operands"}), (new, old)


RULES: list[tuple[str, dict[str, Any], str]] = [  # kernel, attributes, what is refused
    ("attention", {"head_size": 3}, "head_size divides P: 3, 4"),
    ("attention", {"head_size": 0}, "head_size divides P: 0, 4"),
    ("attention", {"block": -1}, "0 at most block: 0, -1"),
    ("key_mass", {"kv_heads": 3}, "kv_heads divides sets: 3, 4"),
    ("key_mass", {"head_size": 3}, "sets*head_size divides Q: 12, 8"),
    ("key_mass", {"head_size": 1}, "Q divides head_size*N: 8, 4"),
    ("prefix_logsumexp", {"kv_heads": 1, "head_size": 4}, "head_size*N divides Q: 16, 8"),
    ("prefix_logsumexp", {"kv_heads": 4, "head_size": 1}, "Q divides head_size*N: 8, 4"),
    ("prefix_logsumexp", {"kv_heads": 3}, "kv_heads*head_size divides Q: 6, 8"),
    ("prefix_logsumexp", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("prefix_logsumexp", {"layer": -1}, "0 at most layer: 0, -1"),
    ("key_mass", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("key_mass", {"layer": -1}, "0 at most layer: 0, -1"),
    ("selected_attention", {"slot": 2}, "slot*sets*tiles*numbers+1 at most W: 25, 24"),
    ("selected_attention", {"slot": -1}, "0 at most slot: 0, -1"),
    ("selected_attention", {"page": 3}, "page divides k: 3, 4"),
    ("selected_attention", {"page": 0}, "1 at most page: 1, 0"),
    ("selected_attention", {"k": 6}, "sets*tiles*numbers divides W: 16, 24"),
    ("selected_attention", {"tiles": 0}, "1 at most tiles: 1, 0"),
    ("selected_attention", {"rows": -1}, "0 at most rows: 0, -1"),
    ("key_mass", {"rows": -1}, "0 at most rows: 0, -1"),
    ("page_bounds", {"rows": -1}, "0 at most rows: 0, -1"),
    ("selected_attention", {"kv_heads": 3}, "kv_heads divides sets: 3, 4"),
    ("selected_attention", {"head_size": 4}, "sets*head_size divides Q: 16, 8"),
    ("selected_attention", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("selected_attention", {"block": -1}, "0 at most block: 0, -1"),
    ("prefix_attention", {"kv_heads": 3}, "kv_heads*head_size divides Q: 6, 8"),
    ("prefix_attention", {"head_size": 4, "kv_heads": 1}, "head_size*N divides Q: 16, 8"),
    ("prefix_attention", {"head_size": 1}, "Q divides head_size*N: 8, 4"),
    ("prefix_attention", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("prefix_attention", {"block": -1}, "0 at most block: 0, -1"),
    ("joined_attention", {"kv_heads": 3}, "kv_heads*head_size divides Q: 6, 8"),
    ("joined_attention", {"head_size": 4, "kv_heads": 1}, "head_size*V divides W: 96, 48"),
    ("joined_attention", {"head_size": 1}, "W divides head_size*V: 48, 24"),
    ("joined_attention", {"head_size": 1}, "Q divides head_size*N: 8, 4"),
    ("joined_attention", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("joined_attention", {"block": -1}, "0 at most block: 0, -1"),
    ("joined_attention", {"slot": 2}, "slot*rows*Q+1 at most W: 49, 48"),
    ("joined_attention", {"slot": -1}, "0 at most slot: 0, -1"),
    ("joined_attention", {"rows": 4}, "rows*Q divides W: 32, 48"),
    ("joined_attention", {"rows": 0}, "1 at most rows: 1, 0"),
    ("query_change", {"rows": 2}, "rows*Q divides W: 16, 24"),
    ("query_change", {"rows": 0}, "1 at most rows: 1, 0"),
    ("token_importance", {"head_size": 3}, "kv_heads*head_size divides Q: 6, 8"),
    ("token_importance", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("token_importance", {"layer": -1}, "0 at most layer: 0, -1"),
    ("token_importance", {"pool": 0}, "1 at most pool: 1, 0"),
    ("page_bounds", {"kv_heads": 3}, "kv_heads divides sets: 3, 4"),
    ("page_bounds", {"head_size": 4}, "sets*head_size divides Q: 16, 8"),
    ("page_bounds", {"slot": 2}, "2*slot*kv_heads*head_size+1 at most X: 17, 16"),
    ("page_bounds", {"slot": -1}, "0 at most slot: 0, -1"),
    ("page_extrema", {"page": 0}, "1 at most page: 1, 0"),
    ("page_extrema", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("page_extrema", {"layer": -1}, "0 at most layer: 0, -1"),
    ("page_extrema", {"slot": 3}, "2*slot*kv_heads*head_size+1 at most W: 25, 24"),
    ("page_extrema", {"slot": -1}, "0 at most slot: 0, -1"),
    ("page_extrema", {"kv_heads": 4}, "2*kv_heads*head_size divides W: 16, 24"),
    ("top_keys", {"slot": 2}, "slot*sets*numbers+1 at most W: 25, 24"),
    ("top_keys", {"slot": -1}, "0 at most slot: 0, -1"),
    ("top_keys", {"page": 3}, "page divides k: 3, 4"),
    ("top_keys", {"page": 0}, "1 at most page: 1, 0"),
    ("top_keys", {"k": 6}, "sets*numbers divides W: 16, 24"),
    ("kv_attention", {"kv_heads": 3}, "kv_heads*head_size divides Q: 6, 8"),
    ("kv_attention", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("kv_attention", {"layer": -1}, "0 at most layer: 0, -1"),
    ("kv_attention", {"block": -1}, "0 at most block: 0, -1"),
    ("pack_keys", {"layer": 2}, "2*layer*kv_heads*head_size+1 at most X: 17, 16"),
    ("pack_keys", {"layer": -1}, "0 at most layer: 0, -1"),
    ("pack_keys", {"head_size": 4}, "head_size*N divides W: 8, 4"),
    ("select_keys", {"pool": 0}, "1 at most pool: 1, 0"),
    ("kv_store", {"layer": 2}, "2*layer*W+1 at most X: 17, 16"),
    ("kv_store", {"layer": -1}, "0 at most layer: 0, -1"),
    ("moe_route", {"groups": 3}, "groups divides E: 3, 8"),
    ("moe_route", {"top_groups": 5}, "top_groups at most groups: 5, 4"),
    ("rotary", {"head_size": 5}, "head_size divides W: 5, 8"),
    ("rotary", {"head_size": 2}, "2*R at most head_size: 4, 2"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "attrs", "text"), RULES)
def test_rules_of_operators(kernel: str, attrs: dict[str, Any], text: str) -> None:
    document = launched(BY_KERNEL[kernel])
    document["ops"][0]["attrs"].update(attrs)
    said = [violation.message for violation in check_plan(document) if violation.code == "operator"]
    assert f"op 0 'launch': {kernel} needs {text}" in said


@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [
        ("attention", {"head_size": 4}), ("attention", {"head_size": 1}), ("attention", {"block": 0}),
        ("kv_attention", {"layer": 0}), ("kv_store", {"layer": 0}), ("moe_route", {"groups": 2}),
        ("key_mass", {"layer": 0}), ("selected_attention", {"layer": 0, "slot": 0, "block": 0}), ("top_keys", {"slot": 0}),
        ("token_importance", {"layer": 0, "pool": 1}),
        ("prefix_attention", {"layer": 0, "block": 0}), ("joined_attention", {"layer": 0, "slot": 0, "block": 0}),
        ("query_change", {"rows": 1}), ("pack_keys", {"layer": 0}), ("select_keys", {"pool": 1}),
        ("prefix_logsumexp", {"layer": 0}), ("top_keys", {"k": 2, "page": 1}), ("top_keys", {"k": 2, "page": 1, "slot": 0}),
        ("page_bounds", {"slot": 0}), ("page_extrema", {"layer": 0, "slot": 0, "page": 1}),
        ("moe_route", {"groups": 8, "top_groups": 8}), ("rotary", {"head_size": 8}),
    ],
)  # fmt: skip
def test_rules_hold_at_their_borders(kernel: str, attrs: dict[str, Any]) -> None:
    document = launched(BY_KERNEL[kernel])
    document["ops"][0]["attrs"].update(attrs)
    assert codes(document) == set()


SEEN: list[tuple[str, str, list[int], str]] = [  # kernel, operand, its shape, what is said
    ("attention", "v", [4, 4], "sees v buffer 2 'v' as [4, 4], expected [5, 4]"),
    ("attention", "y", [5, 8], "sees y buffer 4 'y' as [5, 8], expected [6, 8]"),
    ("linear", "weight", [3, 5], "sees weight buffer 1 'weight' as [3, 5], expected [3, 4]"),
    ("linear", "weight", [3], "sees weight buffer 1 'weight' as [3], expected [O, 4]"),
    ("attention", "q", [], "sees q buffer 0 'q' as [], expected [T, Q]"),
    ("moe_sort", "offsets", [8], "sees offsets buffer 2 'offsets' as [8], expected [9]"),
    ("moe_gather", "order", [11], "sees order buffer 1 'order' as [11], expected [12]"),
    ("grouped_linear", "offsets", [5], "sees offsets buffer 2 'offsets' as [5], expected [4]"),
]


@pytest.mark.parametrize(("kernel", "operand", "shape", "text"), SEEN)
def test_what_an_operator_sees_of_an_operand(kernel: str, operand: str, shape: list[int], text: str) -> None:
    document = launched(BY_KERNEL[kernel])
    document["buffers"][names_of(BY_KERNEL[kernel])[operand]]["shape"] = shape
    found = [violation.message for violation in check_plan(resettled(document)) if violation.code == "operator"]
    assert found == [f"op 0 'launch': {kernel} {text}"]


def test_what_an_operator_sees_in_a_loop() -> None:
    document = looped(BY_KERNEL["copy"])
    document["ops"][0]["slices"].pop()
    (found,) = [violation.message for violation in check_plan(document) if violation.code == "operator"]
    assert found == "op 0 'launch': copy sees y buffer 1 'y' as [6, 4], expected [4 by 'rows', 4]"


def test_heads_of_a_norm_divide_its_rows() -> None:
    document = launched(BY_KERNEL["head_norm"])
    document["buffers"][1]["shape"] = [3]
    document["ops"][0]["bytes"] += 4
    (violation,) = check_plan(document)
    assert violation.message == "op 0 'launch': head_norm needs H divides W: 3, 8"


def test_every_launch_has_scratch_where_its_kernel_takes_it() -> None:
    for launch in LAUNCHES:
        document = launched(launch)
        row = document["ops"][0]
        b = len(document["buffers"])
        document["buffers"].append({**buffer("scratch", (0, 1), 0, kind="scratch"), "id": b})
        row["operands"]["scratch"] = b
        row["writes"].append(b)
        assert codes(resettled(document)) == set(), launch.kernel
