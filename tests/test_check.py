"""The plan checker accepts what was laid out by hand and refuses every way to break it, with the right reason."""

from __future__ import annotations

import ast
import copy
import doctest
import json
import pkgutil
import random
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_examples import EXAMPLES, KIB, Document, Row, barrier, buffer, decoder, op, plan, region
from plan_mutations import MUTATIONS, settle_totals
from plan_random import settle

from mosaic.errors import CheckFailed, PlanFormatError
from mosaic.planner import check
from mosaic.planner.check import Violation, check_plan, check_safety, require_valid, require_well_formed

STREAMS = {"side_stream", "two_side_streams", "streamed", "offloaded", "joined_in_loop"}


def codes(document: Document) -> set[str]:
    return {violation.code for violation in check_plan(document)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_accepts_examples(name: str) -> None:
    document = EXAMPLES[name]()
    assert check_plan(document) == []
    assert check_plan(json.loads(json.dumps(document))) == []
    require_valid(document)


def test_accepts_decoder() -> None:
    assert check_plan(decoder()) == []


def test_reads_without_writing() -> None:
    document = decoder(2)
    before = copy.deepcopy(document)
    check_plan(document)
    assert document == before


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(EXAMPLES)), st.sampled_from(sorted(MUTATIONS)), st.data())
def test_refuses_mutations(name: str, mutation: str, data: st.DataObject) -> None:
    document = EXAMPLES[name]()
    broken = MUTATIONS[mutation](document, lambda options: data.draw(st.sampled_from(options)))
    if broken is not None and broken[0] != document:
        assert broken[1] in codes(broken[0])


@pytest.mark.some
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mutation_breaks_an_example(mutation: str) -> None:
    """Each mutation applies somewhere, and wherever it does its reason is found."""
    applied = 0
    for document in (build() for build in EXAMPLES.values()):
        for seed in range(2):
            broken = MUTATIONS[mutation](document, random.Random(seed).choice)
            if broken is not None and broken[0] != document:
                applied += 1
                assert broken[1] in codes(broken[0]), (document["buffers"][1]["name"], seed)
    assert applied


# Reasons one by one, where a random mutation would not get there.


def test_newer_schema_is_refused_by_name() -> None:
    with pytest.raises(PlanFormatError, match=r"mosaic\.plan/2"):
        check_plan({**EXAMPLES["chain"](), "schema": "mosaic.plan/2"})
    with pytest.raises(PlanFormatError):
        check_plan({})


def test_require_valid_raises_all_messages() -> None:
    document = EXAMPLES["chain"]()
    document["peak_bytes"] += 512
    document["total_bytes"] += 1
    with pytest.raises(CheckFailed) as caught:
        require_valid(document)
    assert [text.partition(":")[0] for text in caught.value.violations] == ["peak", "total"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("buffers", 0, "offset"), "0"),
        (("buffers", 0, "offset"), -512),
        (("buffers", 0, "offset"), 0.0),
        (("buffers", 0, "shape"), [2, None]),
        (("buffers", 0, "dtype"), "float31"),
        (("buffers", 0, "kind"), "cache"),
        (("buffers", 0, "rotate"), 0),
        (("buffers", 0, "alias_of"), 99),
        (("buffers", 0, "gaps"), [[0]]),
        (("ops", 0, "reads"), [99]),
        (("ops", 0, "writes"), ["a"]),
        (("ops", 0, "flops"), -1),
        (("ops", 0, "bytes"), -1),
        (("ops", 0, "operands"), {"x": None}),
        (("ops", 0, "slices"), [["x", 0, "rows"]]),
        (("ops", 0, "inplace"), [1, 2]),
        (("ops", 0), None),
        (("ops",), {}),
        (("fits",), 1),
        (("components", "weights"), None),
        (("formula",), [1]),
        (("trace",), ["x"]),
        (("mesh",), {}),
        (("host_bytes",), -1),
        (("implementations",), {"attention": 1}),
        (("predicted_step_ms",), float("nan")),
        (("ops", 0, "operands"), {"x": 99}),
        (("ops", 0, "attrs"), {"heads": None}),
    ],
)
def test_malformed_documents(path: tuple[str | int, ...], value: object) -> None:
    document = EXAMPLES["chain"]()
    at: object = document
    for key in path[:-1]:
        at = at[key]  # type: ignore[index]
    at[path[-1]] = value  # type: ignore[index]
    assert codes(document) == {"format"}


@pytest.mark.parametrize("name", ["step", "offloaded"])
def test_every_missing_field_is_malformed(name: str) -> None:
    document = EXAMPLES[name]()
    rows = {
        key: document[key][0] for key in ("ops", "buffers", "regions", "barriers", "edges", "pools") if document[key]
    }
    for row in (document, *rows.values()):
        for key in [key for key in row if key != "schema"]:
            value = row.pop(key)
            assert codes(document) == {"format"}, key
            row[key] = value
    assert codes(document) == set()


def test_messages_carry_names_and_numbers() -> None:
    document = EXAMPLES["chain"]()
    document["buffers"][2]["offset"] = 2048
    overlap = next(violation for violation in check_plan(document) if violation.code == "overlap")
    assert overlap.buffers == (1, 2)
    assert "buffer 1 'a' at [2048, 4096)" in overlap.message
    assert str(Violation(code="gap", message="m")) == "gap: m"


def test_weights_never_share_bytes() -> None:
    document = EXAMPLES["pools"]()
    document["buffers"][4]["offset"] = 1024
    assert "overlap" in codes(document)


def test_weights_are_not_written() -> None:
    document = EXAMPLES["pools"]()
    document["ops"][0]["writes"].append(4)
    document["ops"][0]["operands"]["w1"] = 4
    assert "read-only" in codes(document)


def test_operands_name_what_is_touched() -> None:
    document = EXAMPLES["chain"]()
    del document["ops"][1]["operands"]["w1"]  # the scratch
    assert codes(document) == {"operands"}


def test_untouched_buffer() -> None:
    document = EXAMPLES["chain"]()
    document["buffers"].append({**buffer("ghost", (0, 0), 0), "id": 5})
    assert codes(document) == {"unused"}


def test_lifetime_of_loop_input_reaches_loop_end() -> None:
    """x is last read by op 2, but the next chunk reads it again: without the stretch `up` could lie over it."""
    document = EXAMPLES["chunked"]()
    document["buffers"][1]["end"] = 3
    assert "lifetime-short" in codes(document)


def test_uninitialised_accumulator() -> None:
    document = EXAMPLES["nested"]()
    document["ops"][2].update(writes=[], operands={})
    assert {"barrier-mismatch", "lifetime-short"} <= codes(document)  # without the clear it is carried


def test_a_loop_reads_no_more_than_it_has_written_so_far() -> None:
    """The first iteration would read rows of x that later ones write, unless there is one iteration, or one op is outside."""
    document = plan(
        [
            op("embed", [0], [1], region="rows", slices=[(0, "rows"), (1, "rows")]),
            op("look", [1], [2], region="rows", slices=[(2, "rows")]),
        ],
        [buffer("ids", (0, 2), 4, 4, kind="input"), buffer("x", (0, 2), 0, 4), buffer("y", (0, 2), 8, 4, kind="output")],
        peak_at="look", peak_kib=12, lower_bound_kib=12, workspace_kib=12, total_kib=20,
        regions=[region("rows", (0, 2), 4, 1, 4)],
        barriers=[barrier("rows", (0, 2), of="rows", inputs=[0], outputs=[1, 2])],
    )  # fmt: skip
    assert codes(document) == {"read-before-write"}
    sliced = copy.deepcopy(document)
    sliced["ops"][1]["slices"].append(["r0", 0, "rows", 1])
    assert codes(sliced) == set()
    once = copy.deepcopy(document)
    once["regions"][0].update(rows=4, count=1)
    once["config"]["rows"] = 4
    assert codes(once) == set()
    after = copy.deepcopy(document)
    after["regions"][0].update(end=1)
    after["barriers"][0].update(end=1, outputs=[1])
    after["ops"][1].update(region=None, slices=[])
    after["buffers"][0]["end"], after["buffers"][2]["start"] = 1, 1
    assert "read-before-write" not in codes(after)
    before = copy.deepcopy(document)
    before["ops"][0].update(region=None, slices=[])
    before["regions"][0].update(start=1)
    before["barriers"][0].update(start=1, inputs=[1], outputs=[2])
    before["buffers"][0]["end"], before["buffers"][2]["start"] = 1, 1
    assert "read-before-write" not in codes(before)


def test_carried_buffer_must_be_written() -> None:
    document = EXAMPLES["carried"]()
    document["ops"][3].update(writes=[5], operands={"r0": 4, "w1": 5})
    assert "read-before-write" in codes(document)


def test_home_holds_every_access() -> None:
    document = EXAMPLES["chunked"]()
    document["ops"][4]["reads"].append(3)
    document["ops"][4]["operands"]["r1"] = 3
    assert "region" in codes(document)


def test_regions_nest() -> None:
    document = EXAMPLES["nested"]()
    document["regions"][1].update(start=0)
    assert "region" in codes(document)
    document = EXAMPLES["nested"]()
    document["regions"][1]["parent"] = None
    assert "region" in codes(document)
    document = EXAMPLES["nested"]()
    document["regions"][0]["parent"] = "inner"
    assert "region" in codes(document)


def test_configuration_agrees_with_regions() -> None:
    document = EXAMPLES["chunked"]()
    document["config"]["ffn"] = None
    assert codes(document) == {"config"}


def test_second_barrier_of_a_region() -> None:
    document = EXAMPLES["chunked"]()
    document["barriers"].append(copy.deepcopy(document["barriers"][0]))
    assert codes(document) == {"barrier-mismatch"}


def test_idle_explicit_barrier_is_allowed() -> None:
    document = EXAMPLES["chain"]()
    document["barriers"].append(barrier("idle", (0, 1), inputs=[1]))
    assert codes(document) == set()


def test_slice_of_unrelated_region() -> None:
    document = EXAMPLES["nested"]()
    document["ops"][1]["slices"][0][2] = "inner"
    assert codes(document) == {"slice"}


def test_carry_values() -> None:
    document = EXAMPLES["chain"]()
    document["buffers"][4]["kind"] = "carry"  # written: lives to the end, as the output did
    assert codes(document) == set()
    document["buffers"][2]["kind"] = "carry"
    assert "lifetime-short" not in codes(document)  # it ends with the plan already
    document["buffers"][1]["kind"] = "carry"
    assert "lifetime-short" in codes(document)


def test_double_buffer_counts_both_slots() -> None:
    document = EXAMPLES["chunked"]()
    slots = document["buffers"][3]
    slots.update(rotate=2, size=4096)
    document.update(peak_bytes=16384, lower_bound_bytes=16384, formula=[{"expr": "16384", "at": "up"}])
    assert codes(document) == set()
    slots["size"] = 2048
    assert "size" in codes(document)


def test_well_formed_means_readable_to_the_last_field() -> None:
    require_well_formed(EXAMPLES["step"]())
    for key, value in (("formula", [1]), ("trace", ["x"]), ("mesh", {}), ("dims", {"tokens": 0})):
        with pytest.raises(PlanFormatError, match=key):
            require_well_formed({**EXAMPLES["step"](), key: value})


# Operators, formula, settings.


@pytest.mark.parametrize(
    "expr",
    [
        "",
        "4096*tokens+4",
        "tokens",
        "4096*tokens - 4",
        "1e3",
        "__import__('os')",
        "2*tokens**10",
        "9" * 41,
        "1*tokens**",
    ],
)
def test_formula_is_a_sum_of_products_and_nothing_else(expr: str) -> None:
    document = EXAMPLES["step"]()
    document["formula"][1]["expr"] = expr
    assert codes(document) == {"formula"}


def test_formula_takes_powers() -> None:
    document = EXAMPLES["step"]()
    document["formula"][0]["expr"] = "1024*tokens**2 + 4*seqs*masked + 16"
    assert codes(document) == set()


def test_every_line_of_the_formula_is_what_is_live_at_its_op() -> None:
    """Not only the largest: here the smaller one, by less than 512 bytes a buffer."""
    document = EXAMPLES["step"]()
    document["formula"][1]["expr"] = "2048*ffn_rows + 900*tokens"
    assert codes(document) == {"formula"}


def test_unknown_kernels_are_their_authors_word() -> None:
    document = EXAMPLES["step"]()
    document["ops"][9].update(kernel="my_stats", attrs={"anything": 1}, flops=1, bytes=1)
    assert codes(document) == set()
    document["declared"] = {"kernels": [], "streams": []}
    assert codes(document) == {"kernels"}
    document["declared"]["kernels"] = ["my_stats"]
    assert codes(document) == set()


def test_attention_is_given_keys_and_values_whole() -> None:
    """A loop over queries may slice q and y, and nothing else."""
    document = EXAMPLES["step"]()
    attention = document["ops"][4]
    document["regions"].append(region("rows", (4, 5), 4, 2, 2))
    document["regions"][1].update(dim="tokens", knob="ffn")
    document["barriers"].append(barrier("rows", (4, 5), of="rows", inputs=[1, 11, 12, 13], outputs=[14]))
    attention.update(region="rows", slices=[["q", 0, "rows", 1], ["y", 0, "rows", 1]], bytes=24592)
    for step in document["trace"]:
        step["config"] = document["config"]
    document["trace"].pop(0)
    assert codes(document) == set()
    attention["slices"] += [["k", 0, "rows", 1], ["v", 0, "rows", 1]]
    assert "operator" in codes(document)


def test_a_plan_that_does_not_fit_promises_no_context() -> None:
    document = EXAMPLES["step"]()
    document.update(max_ctx_tokens=3)
    assert codes(document) == {"context"}
    document.update(budget_bytes=document["total_bytes"] - 1, fits=False)
    assert codes(document) == set()


# Aliases.


def test_alias_reads_old_value() -> None:
    """An op reads the root again after an alias was written over it."""
    document = EXAMPLES["alias_group"]()
    document["ops"][3]["reads"].append(1)
    document["ops"][3]["operands"]["r1"] = 1
    assert codes(document) == {"alias-stale-read"}


def test_an_alias_of_no_bytes_overwrites_none() -> None:
    """It lies in the middle of its root and of another alias, and lives beside both."""
    document = EXAMPLES["alias_group"]()
    document["buffers"][3].update(shape=[0, 256], size=0, alias_offset=512, offset=2560)
    document["buffers"][4].update(alias_offset=0, offset=2048)
    document["ops"][2]["reads"].append(1)
    document["ops"][2]["operands"]["r1"] = 1
    assert "alias-stale-read" not in codes(document)
    document["buffers"][3].update(shape=[1, 128], size=512)
    assert "alias-stale-read" in codes(document)


def test_alias_beyond_its_root() -> None:
    document = EXAMPLES["alias_group"]()
    document["buffers"][4].update(alias_offset=3072, offset=5120)
    assert {"alias", "size"} <= codes(document)


def test_alias_of_an_alias() -> None:
    document = EXAMPLES["alias_group"]()
    document["buffers"][4]["alias_of"] = 3
    assert "alias" in codes(document)


def test_alias_destroys_an_output() -> None:
    document = EXAMPLES["inplace"]()
    document["buffers"][1]["kind"] = "output"  # the queries shall be handed on, but attention's output lies over them
    assert "alias-stale-read" in codes(document)


def test_the_last_op_may_not_overwrite_in_place_what_the_step_hands_on() -> None:
    """Nothing reads the queries after attention, and attention is the last op: an output is read after that."""
    document = EXAMPLES["inplace"]()
    document["ops"].pop()
    document["buffers"].pop()
    for row in document["buffers"][1:]:
        row["end"] = min(row["end"], 3)
    document["buffers"][3]["kind"] = "output"
    assert codes(packed(document)) == set()
    document["buffers"][1]["kind"] = "output"
    assert codes(packed(document)) == {"alias-stale-read"}


def test_inplace_at_another_address() -> None:
    """A permission to overwrite holds row by row, not for a shifted result."""
    document = EXAMPLES["inplace"]()
    document["buffers"][1].update(size=3072)
    document["buffers"][2]["offset"] = 5120
    document["buffers"][3].update(alias_offset=1024, offset=3072)
    document.update(peak_bytes=7168, lower_bound_bytes=7168)
    assert codes(document) == {"alias-stale-read"}


def test_loop_overwrites_what_its_next_iteration_reads() -> None:
    """The same loop as `inplace_sliced`, but the op reads all rows each time."""
    document = EXAMPLES["inplace_sliced"]()
    document["ops"][1]["slices"] = [cut for cut in document["ops"][1]["slices"] if cut[0] != "r0"]
    assert codes(document) == {"alias-stale-read"}


def test_what_an_iteration_wrote_of_an_output_the_next_one_overwrites() -> None:
    """Each writes its own slice last, so that only the last slice survives what begins the next iteration."""
    cut = [(4, "rows")]
    ops = [
        op("embed", [0], [1]),
        op("norm", [1], [2], region="rows"),
        op("mix", [2], [3], region="rows"),
        op("store", [3], [4], region="rows", slices=cut),
    ]
    buffers = [
        buffer("ids", (0, 1), 8, 4, kind="input"),
        buffer("x", (0, 4), 4, 4),
        buffer("t", (1, 3), 0, 1, region="rows", alias_of=4),
        buffer("u", (2, 4), 8, 1, region="rows"),
        buffer("y", (1, 4), 0, 4, kind="output"),
    ]
    document = plan(
        ops, buffers, peak_at="mix", peak_kib=12, lower_bound_kib=9, workspace_kib=12, total_kib=20,
        regions=[region("rows", (1, 4), 4, 1, 4)],
        barriers=[barrier("rows", (1, 4), of="rows", inputs=[1], outputs=[4])],
    )  # fmt: skip
    document["optimal"] = False
    assert codes(document) == {"alias-stale-read"}
    document["ops"][1]["slices"] = []
    document["buffers"][2].update(alias_of=None, offset=11 * KIB)
    assert "alias-stale-read" not in codes(document)


def test_loop_reads_slice_before_next_op_overwrites_it() -> None:
    """Read in one op, overwritten by the next: legal for slices that move on together, and only in that order."""
    cut = [(1, "rows"), (3, "rows")]
    ops = [
        op("embed", [0], [1]),
        op("norm", [1], [2], region="rows", slices=cut),
        op("store", [2], [3], region="rows", slices=cut),
        op("head", [3], [4]),
    ]
    buffers = [
        buffer("ids", (0, 1), 4, 4, kind="input"),
        buffer("x", (0, 4), 0, 4),
        buffer("t", (1, 3), 4, 1, region="rows"),
        buffer("y", (1, 4), 0, 4, alias_of=1),
        buffer("logits", (3, 4), 4, 4, kind="output"),
    ]
    document = plan(
        ops, buffers, peak_at="head", peak_kib=8, lower_bound_kib=8, workspace_kib=8, total_kib=16,
        regions=[region("rows", (1, 3), 4, 1, 4)],
        barriers=[barrier("rows", (1, 3), of="rows", inputs=[1], outputs=[3])],
    )  # fmt: skip
    assert codes(document) == set()
    late = copy.deepcopy(document)
    late["ops"][2]["reads"].append(1)  # reads the slice that it overwrites, without permission
    late["ops"][2]["operands"]["r1"] = 1
    late["ops"][2]["slices"].append(["r1", 0, "rows", 1])
    assert codes(late) == {"alias-stale-read"}
    after = copy.deepcopy(document)
    after["ops"][3]["reads"].append(1)
    after["ops"][3]["operands"]["r1"] = 1
    assert codes(after) == {"alias-stale-read"}


def filled(*, sink_kib: int = 0, late: bool = True) -> Document:
    """A loop makes t, then fills y slice by slice; y lies in t's storage, from `sink_kib` KiB on."""
    ops = [
        op("embed", [0], [1]),
        op("make", [1], [2], region="rows", slices=[(1, "rows")]),
        op("use", [2], [3], region="rows", slices=[(3, "rows")]),
        op("fill", [1, 3], [4], region="rows", slices=[(1, "rows"), (3, "rows"), (4, "rows")]),
    ]
    buffers = [
        buffer("ids", (0, 1), 5, 4, kind="input"),
        buffer("x", (0, 4), 0, 4),
        buffer("t", (1, 4), 4, 1, covers_kib=sink_kib + 4),
        buffer("u", (2, 4), 10, 1, region="rows"),
        buffer("y", (1, 4), 4 + sink_kib, 4, kind="output", alias_of=2, alias_kib=sink_kib),
    ]
    return plan(
        ops, buffers, peak_at="use", peak_kib=11, lower_bound_kib=9 + sink_kib, workspace_kib=12, total_kib=20,
        regions=[region("rows", (1, 4), 4, 1, 4)],
        barriers=[barrier("rows", (1, 4), of="rows", inputs=[1], outputs=[2, 4])],
    )  # fmt: skip


def test_a_slice_does_not_restore_what_the_next_iteration_overwrites() -> None:
    """y's first slice is lost when the second iteration makes t; that y is written again does not bring it back."""
    document = filled()
    assert codes(document) == {"alias-stale-read"}
    once = copy.deepcopy(document)
    once["regions"][0].update(rows=4, count=1)
    once["config"]["rows"] = 4
    assert "alias-stale-read" not in codes(once)


def test_a_root_has_its_own_bytes_not_those_of_its_aliases() -> None:
    """t is 1 KiB of a storage that its alias makes 5; y behind it shares nothing with it."""
    assert "alias-stale-read" not in codes(filled(sink_kib=1))


def test_a_loop_may_fill_after_a_gap_what_had_no_value_before() -> None:
    """t dies, its bytes are free for a while, then a loop fills y in them slice by slice; y must be new then."""
    cut = [(1, "rows"), (4, "rows")]
    ops = [
        op("embed", [0], [1]),
        op("make", [1], [2]),
        op("rest", [1], [3]),
        op("fill", [1], [4], region="rows", slices=cut),
    ]
    buffers = [
        buffer("ids", (0, 1), 4, 4, kind="input"),
        buffer("x", (0, 4), 0, 4),
        buffer("t", (1, 4), 4, 4, gaps=[(2, 3)]),
        buffer("u", (2, 3), 4, 4),
        buffer("y", (3, 4), 4, 4, kind="output", alias_of=2),
    ]
    document = plan(
        ops, buffers, peak_at="embed", peak_kib=8, lower_bound_kib=8, workspace_kib=8, total_kib=16,
        regions=[region("rows", (3, 4), 4, 1, 4)], barriers=[barrier("rows", (3, 4), of="rows", inputs=[1], outputs=[4])],
    )  # fmt: skip
    assert codes(document) == set()
    filled_before = copy.deepcopy(document)
    filled_before["ops"][1]["writes"], filled_before["ops"][1]["operands"]["w0"] = [4], 4
    filled_before["buffers"][4]["start"] = 1
    assert "gap" in codes(filled_before)
    for kind in ("carry", "input"):  # these hold a value before
        held = copy.deepcopy(document)
        held["buffers"][4]["kind"] = kind
        assert "gap" in codes(held)


def test_barrier_protects_an_alias() -> None:
    document = EXAMPLES["inplace"]()
    document["barriers"].append(barrier("keep q", (0, 4), inputs=[1]))
    assert codes(document) == {"alias-stale-read"}


# Gaps.


def test_gap_before_a_partial_write() -> None:
    """The value comes back by an update: it was never gone."""
    document = EXAMPLES["gap"]()
    document["ops"][4]["reads"].append(1)
    document["ops"][4]["operands"]["r1"] = 1
    assert codes(document) >= {"gap"}


def test_gap_in_a_held_interval() -> None:
    document = EXAMPLES["gap"]()
    document["barriers"].append(barrier("keep a", (0, 4), inputs=[1]))
    assert "gap" in codes(document)


def test_gap_on_the_way_round_a_loop() -> None:
    """The loop's start reads a value from before the gap at the end of the previous iteration."""
    ops = [
        op("first", [0], [1]),
        op("use", [1], [2], region="rows"),
        op("other", [2], [3], region="rows"),
        op("again", [3], [1]),
        op("last", [1], [4]),
    ]
    buffers = [
        buffer("x", (0, 1), 1, kind="input"),
        buffer("a", (0, 5), 0),
        buffer("t", (1, 3), 1, region="rows"),
        buffer("u", (1, 4), 2),
        buffer("y", (4, 5), 1, kind="output"),
    ]
    document = plan(
        ops, buffers, peak_at="use", peak_kib=3, lower_bound_kib=3, workspace_kib=4, total_kib=12,
        regions=[region("rows", (1, 3), 4, 1, 4)],
        barriers=[barrier("rows", (1, 3), of="rows", inputs=[1], outputs=[3])],
    )  # fmt: skip
    assert codes(document) == set()
    document["buffers"][1]["gaps"] = [[2, 3]]
    assert "gap" in codes(document)


def test_a_gap_inside_the_inner_loop_that_fills() -> None:
    """The inner loop fills `rows` slice by slice: what its first iteration wrote, the gap of its second one would lose."""
    ops = [
        op("first", [0], [1]),
        op("other", [1], [2], region="inner"),
        op("fill", [1], [3], region="inner", slices=[(3, "inner")]),
        op("use", [3], [4], region="outer"),
        op("last", [4], [5]),
    ]
    kinds = ("input", "transient", "transient", "transient", "transient", "output")
    homes = (None, None, "inner", "outer", None, None)
    buffers = [
        buffer(f"b{b}", (0, 0), 0, 4, kind=kind, region=home)
        for b, (kind, home) in enumerate(zip(kinds, homes, strict=True))
    ]
    document = plan(
        ops, buffers, peak_at="first", peak_kib=0, lower_bound_kib=0, workspace_kib=0, total_kib=0,
        regions=[region("outer", (1, 4), 4, 1, 4), region("inner", (1, 3), 4, 1, 4, parent="outer")],
    )  # fmt: skip
    settle(document, random.Random(1))
    assert check_safety(document) == []
    document["buffers"][3]["gaps"] = [[1, 2]]
    assert "gap" in {violation.code for violation in check_safety(document)}


# Streams.


def test_dropping_any_edge_is_refused() -> None:
    for name in sorted(STREAMS):
        for k in range(len(EXAMPLES[name]()["edges"])):
            document = EXAMPLES[name]()
            del document["edges"][k]
            assert codes(document), (name, k)


def test_slot_handed_between_streams_without_order() -> None:
    """The second side stream forks one op too early: op 3 has joined the first one, but op 2 has not."""
    document = EXAMPLES["two_side_streams"]()
    document["edges"][2]["from"] = 2
    document["buffers"][6].update(start=3)
    document["buffers"][4].update(start=3)
    assert "stream-race" in codes(document)


def test_disjoint_lifetimes_are_not_enough() -> None:
    """Fork at op 2, join at op 3: `slot` ends where `rows` begins, yet nothing orders the copy before the selection."""
    ops = [
        op("first", [0], [1]),
        op("prefetch", [4], [2], stream="copy"),
        op("second", [1], [3]),
        op("third", [3], [5]),
        op("select", [6], [7], stream="index"),
        op("last", [5, 7], [8]),
    ]
    buffers = [
        buffer("x", (0, 1), 2, kind="input"),
        buffer("a", (0, 3), 0),
        buffer("slot", (1, 3), 1),
        buffer("b", (2, 4), 2),
        buffer("w", (0, 6), 0, kind="weight", pool="weights"),
        buffer("c", (3, 6), 0),
        buffer("v", (0, 6), 1, kind="weight", pool="weights"),
        buffer("rows", (3, 6), 1),
        buffer("y", (5, 6), 2, kind="output"),
    ]
    document = plan(
        ops, buffers, peak_at="second", peak_kib=3, lower_bound_kib=3, workspace_kib=4, weights_kib=4, total_kib=16,
        edges=[("fork", 0, 1), ("wait", 1, 3), ("fork", 2, 4), ("wait", 4, 5)],
    )  # fmt: skip
    assert codes(document) == {"stream-race"}
    document["edges"].append({"kind": "wait", "from": 1, "to": 2})
    assert "stream-race" not in codes(document)


def test_a_loop_side_op_touches_nothing_of_the_workspace_that_lives_outside() -> None:
    document = EXAMPLES["side_stream"]()
    document["regions"].append(region("rows", (2, 4), 4, 1, 4))
    document["config"]["rows"] = 1
    document["ops"][2]["region"] = document["ops"][3]["region"] = "rows"
    assert "stream-race" in codes(document)


def test_never_joined() -> None:
    document = EXAMPLES["side_stream"]()
    document["edges"].pop()
    assert {"stream-race", "lifetime-short"} <= codes(document)


def test_edge_between_wrong_streams() -> None:
    document = EXAMPLES["side_stream"]()
    document["edges"][0]["to"] = 3
    assert "edge" in codes(document)


# Loops with side ops.


def once(document: Document, name: str) -> Document:
    """Let a loop run once, over all rows at a time, one slot for each of its buffers."""
    loop = next(row for row in document["regions"] if row["name"] == name)
    loop.update(rows=loop["extent"], count=1)
    document["config"][loop["knob"]] = loop["rows"]
    for row in document["buffers"]:
        if row["region"] == name:
            rows = loop["rows"] if any(cut[2] == name for cut in slices_of(document, row["id"])) else row["shape"][0]
            row.update(rotate=1, shape=[rows, 256], size=rows * KIB)
    return document


def slices_of(document: Document, b: int) -> list[list[object]]:
    return [cut for op in document["ops"] for cut in op["slices"] if op["operands"][cut[0]] == b]


def packed(document: Document) -> Document:
    """Give each root of the workspace bytes of its own, and budgets that suffice; forget the search."""
    roots = [row for row in document["buffers"] if row["pool"] == "workspace" and row["alias_of"] is None]
    top = 0
    for row in roots:
        row["offset"], top = top, top + row["size"]
    for row in document["buffers"]:
        if row["alias_of"] is not None:
            row["offset"] = document["buffers"][row["alias_of"]]["offset"] + row["alias_offset"]
    document.update(budget_bytes=1 << 40, host_budget_bytes=1 << 40, trace=[])
    settle_totals(document)
    live = [sum(r["size"] for r in roots if r["start"] <= t < r["end"]) for t in range(len(document["ops"]))]
    at = live.index(max(live))
    document["formula"] = [{"expr": str(live[at]), "at": document["ops"][at]["name"]}]
    return document


def test_a_loop_that_runs_once_needs_one_slot() -> None:
    document = EXAMPLES["offloaded"]()
    assert codes(packed(once(once(document, "embed"), "ffn"))) == set()


def test_a_loop_that_runs_once_may_name_more_rows_than_there_are() -> None:
    """Chunk knobs are multiples of a tile; what is at home in the loop has the extent's rows."""
    document = once(EXAMPLES["offloaded"](), "ffn")
    document["regions"][1]["rows"] = document["config"]["ffn"] = 8
    assert codes(packed(document)) == set()
    document["formula"][0]["expr"] = "2048*ffn_rows + 7168"
    assert "formula" in codes(document)
    window = next(row for row in document["buffers"] if row["name"] == "window")
    window.update(shape=[8, 256], size=8 * KIB)
    assert "slice" in codes(packed(document))


def test_the_long_loop_needs_two_slots() -> None:
    document = EXAMPLES["offloaded"]()
    window = next(row for row in document["buffers"] if row["name"] == "window")
    window.update(rotate=1, size=2 * KIB)
    assert codes(packed(document)) == {"stream-race"}
    window.update(rotate=3, size=6 * KIB)
    assert codes(packed(document)) == set()


def test_the_last_write_is_stored() -> None:
    """Forked from `up`, the store runs beside `down`, which still writes the window."""
    document = EXAMPLES["offloaded"]()
    document["edges"][2]["from"] = 3
    assert codes(document) == {"stream-race"}


def test_main_waits_for_the_fetch() -> None:
    document = EXAMPLES["offloaded"]()
    del document["edges"][1]
    assert codes(document) == {"stream-race"}


def test_an_op_of_main_sees_rows_that_another_iteration_stores() -> None:
    """In its own iteration it reads before the store; the store of the iteration before may still run."""
    document = EXAMPLES["offloaded"]()
    document["ops"][3]["reads"].append(2)
    document["ops"][3]["operands"]["r1"] = 2
    assert codes(document) == {"stream-race"}
    document["ops"][3]["slices"].append(["r1", 0, "ffn", 1])
    assert codes(document) == set()


def test_hidden_states_are_stored_before_they_are_fetched() -> None:
    """The border between two loops orders them: without the second loop, only an edge does."""
    document = EXAMPLES["offloaded"]()
    document["regions"].pop()
    document["barriers"].pop()
    del document["config"]["ffn"], document["dims"]["ffn"]
    for row in document["ops"]:
        row["region"] = "embed" if row["region"] == "embed" else None
        row["slices"] = [cut for cut in row["slices"] if cut[2] == "embed"]
    for row in document["buffers"]:
        row["region"] = "embed" if row["region"] == "embed" else None
    for b, life in ((3, (1, 7)), (4, (3, 5))):
        document["buffers"][b].update(shape=[5, 256], size=5 * KIB, rotate=1, start=life[0], end=life[1])
    document["ops"][6]["reads"].append(3)
    document["ops"][6]["operands"]["r1"] = 3
    document["edges"] = [
        {"kind": kind, "from": a, "to": b}
        for kind, a, b in (("fork", 0, 1), ("fork", 0, 2), ("wait", 2, 3), ("fork", 4, 5), ("wait", 5, 6))
    ]
    document["ops"].insert(2, {**op("between", [0], []), "index": 2})
    shift(document, 2)
    found = check_plan(packed(document))
    assert {violation.code for violation in found} == {"stream-race"}
    assert {violation.ops for violation in found} >= {(1, 3)}  # the fetch is forked inside the loop that stores
    document["edges"][1]["from"] = 2  # main, which the loop's end has joined
    document["buffers"][3]["start"] = 3
    assert codes(packed(document)) == set()


def shift(document: Document, at: int) -> None:
    """Renumber after an op was inserted."""
    for i, row in enumerate(document["ops"]):
        row["index"] = i
    for row in document["buffers"]:
        row["start"] += row["start"] >= at and row["start"] > 0
        row["end"] += row["end"] > at
    for edge in document["edges"]:
        edge["from"] += edge["from"] >= at
        edge["to"] += edge["to"] >= at
    document["buffers"][0]["end"] = max(document["buffers"][0]["end"], at + 1)


def test_slots_that_rotate_share_no_storage() -> None:
    document = EXAMPLES["offloaded"]()
    h = next(row for row in document["buffers"] if row["name"] == "h")
    h.update(alias_of=3, offset=0)
    assert "alias" in codes(document)


def test_a_side_op_that_each_iteration_joins_may_touch_what_lives_outside() -> None:
    document = EXAMPLES["joined_in_loop"]()
    fork = document["edges"][0]
    fork["from"] = 0  # from outside: where the loop begins, so iterations overlap
    found = check_plan(document)
    assert {violation.code for violation in found} == {"stream-race"}
    assert any("beside other iterations" in violation.message for violation in found)


def test_an_inner_loop_joins_before_the_outer_one_goes_on() -> None:
    document = EXAMPLES["offloaded_groups"]()
    assert codes(document) == set()
    hidden = document["buffers"][2]
    document["ops"][4]["reads"].append(hidden["id"])  # main reads all of it, between two runs of the inner loop
    document["ops"][4]["operands"]["r2"] = hidden["id"]
    assert codes(document) == set()


# Host memory.


def test_a_constant_of_the_host_is_not_written() -> None:
    document = EXAMPLES["offloaded"]()
    document["buffers"][2]["tensor"] = "model.embed"
    assert "read-only" in codes(document)


def test_hidden_states_hold_nothing_before_they_are_written() -> None:
    document = EXAMPLES["offloaded"]()
    document["ops"][0]["reads"].append(2)
    document["ops"][0]["operands"]["r1"] = 2
    assert "read-before-write" in codes(document)


def test_host_buffers_share_no_bytes() -> None:
    document = EXAMPLES["streamed"]()
    document["buffers"][7]["offset"] = 0
    assert "overlap" in codes(document)


def test_host_memory_has_a_budget_of_its_own() -> None:
    document = EXAMPLES["streamed"]()
    document.update(host_budget_bytes=4096)
    assert codes(document) == {"fits"}
    document.update(fits=False)
    assert codes(document) == set()
    document["pools"][2]["device"] = "cuda:0"
    assert codes(document) == {"pool"}


def test_a_copy_crosses_the_link_once() -> None:
    """One of its two sides may lie in host memory; other kernels read there only what they gather."""
    document = EXAMPLES["streamed"]()
    document["buffers"][8].update(kind="host", pool="host", offset=8 * KIB)
    assert "operator" in codes(packed(document))
    document = EXAMPLES["step"]()
    document["buffers"][3].update(pool="host", offset=0)  # the table, from which the embedding gathers rows
    messages = [violation.message for violation in check_plan(packed(document)) if violation.code == "operator"]
    assert len(messages) == 1
    assert "unembed_stats has weight in host memory" in messages[0]


# Implementations, heads, sampling.


def test_implementations_are_chosen_on_cuda() -> None:
    document = EXAMPLES["step"]()
    for chosen in ({}, {"attention": "abacus"}, {"attention": "triton", "linear": "triton"}, {"attention": "cudnn"}):
        document["implementations"] = chosen  # cuDNN has no 32-bit kernel
        assert codes(document) == {"implementation"}
    document = EXAMPLES["chain"]()
    document["implementations"] = {"attention": "triton"}
    assert codes(document) == {"implementation"}


@pytest.mark.parametrize(
    ("change", "legal"),
    [
        (lambda d: None, True),
        (lambda d: d["ops"][4]["attrs"].update(head_size=256), False),
        (lambda d: d["ops"][4]["attrs"].update(head_size=4), False),
        (lambda d: d["buffers"][1].update(shape=[3]), False),
        (lambda d: d["buffers"][11].update(dtype="float32"), False),
    ],
)
def test_cudnn_takes_one_sequence_in_sixteen_bits(change: Callable[[Document], None], legal: bool) -> None:
    document = EXAMPLES["step"]()
    document["implementations"] = {"attention": "cudnn"}
    for b in (10, 11, 12, 13, 14):
        document["buffers"][b]["dtype"] = "bfloat16"
    change(document)
    assert ("implementation" not in codes(document)) == legal


def heads(document: Document, kv_heads: int = 2) -> Document:
    """Let the attention of `step` run one KV head at a time; k and v of one at home in the loop."""
    document["regions"].insert(0, region("heads", (2, 6), kv_heads, 1, kv_heads, knob="heads"))
    document["regions"][0]["dim"] = "kv_heads"
    document["config"] = {"head": "fused", "heads": 1, "ffn": 2}
    document["barriers"].insert(0, barrier("heads", (2, 6), of="heads", inputs=[1, 11], outputs=[10, 14]))
    cut = {"k": [["weight", 0], ["y", 1]], "v": [["weight", 0], ["y", 1]]}
    cut |= {"mix": [["q", 1], ["k", 1], ["v", 1], ["y", 1]], "o": [["x", 1], ["weight", 1]]}
    for row in document["ops"][2:6]:
        row["region"] = "heads"
        row["slices"] = [[operand, axis, "heads", 128] for operand, axis in cut[row["name"]]]
    for b, life in ((12, (2, 5)), (13, (3, 5))):
        document["buffers"][b].update(region="heads", shape=[4, 128], size=2 * KIB, start=life[0], end=life[1])
    document["ops"][2]["bytes"] = document["ops"][3]["bytes"] = 2 * 4 * KIB + 256 * KIB + 4 * KIB
    document["ops"][4]["bytes"] += 8
    document["ops"][5]["bytes"] = 4 * KIB + 256 * KIB + 2 * 2 * 4 * KIB
    document["buffers"][11].update(end=6)
    document["buffers"][1].update(end=6)
    document["buffers"][14].update(start=2, end=6, alias_of=None)
    return packed(document)


def test_attention_by_groups_of_heads() -> None:
    """Keys and values of one group are whole in their tokens; queries and output go with them."""
    document = heads(EXAMPLES["step"]())
    assert codes(document) == set()
    document["ops"][4]["slices"] = [cut for cut in document["ops"][4]["slices"] if cut[0] not in "qy"]
    assert "operator" in codes(document)  # all queries with the keys of one group


def test_kv_heads_is_what_attention_has() -> None:
    document = EXAMPLES["step"]()
    document["dims"]["kv_heads"] = 4
    assert codes(document) == {"dims"}
    document = heads(EXAMPLES["step"]())
    document["ops"][4]["attrs"]["head_size"] = 64
    assert codes(document) == {"dims"}  # four heads of 64


@pytest.mark.parametrize("head_size", [0, 3, 512])
def test_heads_divide_widths(head_size: int) -> None:
    document = EXAMPLES["step"]()
    document["ops"][4]["attrs"]["head_size"] = head_size
    assert "operator" in codes(document)


@pytest.mark.parametrize(
    ("seqs", "span", "holds"),
    [(1, 4, True), (1, 3, False), (2, 2, True), (2, 3, True), (2, 4, False), (4, 1, True), (4, 2, False)],
)
def test_span_is_a_mean_of_lengths(seqs: int, span: int, holds: bool) -> None:
    document = EXAMPLES["step"]()
    document["dims"].update(seqs=seqs, span=span)
    document["buffers"][1]["shape"] = [seqs + 1]
    document["ops"][4].update(flops=4096 * span, bytes=16384 + 4 * (seqs + 1))
    document["formula"][0]["expr"] = f"4096*tokens + 8*masked + {4 * (seqs + 1)}"
    assert codes(document) == (set() if holds else {"dims"})


@pytest.mark.parametrize(
    ("seqs", "span", "holds"), [(1, 3, True), (1, 2, False), (2, 2, True), (2, 1, False), (4, 1, True)]
)
def test_blocks_see_at_least_half_of_the_keys(seqs: int, span: int, holds: bool) -> None:
    """And each query its own key: (tokens + seqs) / (2 seqs) on average, rounded up."""
    document = EXAMPLES["step"]()
    document["dims"].update(seqs=seqs, span=span)
    document["buffers"][1]["shape"] = [seqs + 1]
    document["ops"][4]["attrs"]["block"] = 1
    document["ops"][4].update(flops=4096 * span, bytes=16384 + 4 * (seqs + 1))
    document["formula"][0]["expr"] = f"4096*tokens + 8*masked + {4 * (seqs + 1)}"
    assert codes(document) == (set() if holds else {"dims"})


SAMPLED = ("sample", "sample_logit")


def sampled(kernel: str) -> Document:
    """The `step` with samples: from chunks of logits of one row, or fused with the unembedding."""
    document = EXAMPLES["step"]()
    inputs = {"keys": ("int64", (2,)), "temperature": ("float32", (2,))}
    for name, (dtype, shape) in {**inputs, "sample": ("int64", (2,)), "sample_logit": ("float32", (2,))}.items():
        kind, life = ("input", (0, 10)) if name in inputs else ("output", (9, 11))
        document["buffers"].append(spec(name, dtype, shape, life, kind=kind, id=len(document["buffers"])))
    ids = {row["name"]: row["id"] for row in document["buffers"]}
    head = document["ops"][9]
    head["operands"].update({name: ids[name] for name in (*inputs, *SAMPLED)})
    head["reads"] += [ids[name] for name in inputs]
    head["writes"] += [ids[name] for name in SAMPLED]
    head.update(kernel=kernel, bytes=head["bytes"] + 16 + 8 + 16 + 8)
    if kernel == "row_sample":  # the rows of 256 are logits here
        head["reads"].remove(3)
        del head["operands"]["weight"]
        head["operands"]["logits"] = head["operands"].pop("x")
        head.update(flops=10 * 2 * 256, bytes=head["bytes"] - 8 * KIB)
    return packed(document)


def spec(name: str, dtype: str, shape: tuple[int, ...], life: tuple[int, int], **more: object) -> Row:
    return {**buffer(name, life, 0), "dtype": dtype, "shape": list(shape), "size": 512, **more}


@pytest.mark.parametrize("kernel", ["row_sample", "unembed_sample"])
def test_samples(kernel: str) -> None:
    document = sampled(kernel)
    assert codes(document) == set()
    temperature = next(row for row in document["buffers"] if row["name"] == "temperature")
    for wrong in ({"shape": [1]}, {"dtype": "float16"}):
        broken = copy.deepcopy(document)
        broken["buffers"][temperature["id"]].update(wrong)
        assert "operator" in codes(broken)


# Fast enough to run on every plan.


def test_time() -> None:
    """418 ops and 548 buffers take 3 ms of one core, as long as writing and reading the document as JSON does."""
    document = decoder()
    assert (len(document["ops"]), len(document["buffers"])) == (418, 548)
    written = min(_seconds(lambda: json.loads(json.dumps(document))) for _ in range(20))
    assert min(_seconds(lambda: check_plan(document)) for _ in range(20)) < 3 * written


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def test_docstrings() -> None:
    modules = [check, *(import_module(f"{check.__name__}.{m.name}") for m in pkgutil.iter_modules(check.__path__))]
    found = [doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL) for module in modules]
    assert sum(result.failed for result in found) == 0
    assert sum(result.attempted for result in found) > 5


def test_the_checker_shares_no_code_with_the_planner() -> None:
    for file in sorted(Path(check.__path__[0]).glob("*.py")):
        names = [
            name
            for node in ast.walk(ast.parse(file.read_text()))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            + ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        ]
        ours = [name for name in names if name.startswith("mosaic")]
        assert all(name == "mosaic.errors" or name.startswith("mosaic.planner.check.") for name in ours), file.name


def test_a_double_buffer_of_the_planner_passes() -> None:
    from mosaic.planner import plan_graph
    from mosaic.registrar.graph import Graph

    def build(g: Graph) -> None:
        tokens = g.dim("tokens")
        x, w = g.input("x", (tokens, 64), "float32"), g.weight("w", (64, 64), "float32")
        y = g.output("y", (tokens, 64), "float32")
        with g.chunk("rows", over=tokens) as rows:
            slot = g.buffer("slot", (rows, 64), "float32", rotate=2)
            g.add_op("linear", x, w, out=slot)
            g.add_op("linear", slot, w, out=y)

    for rows in (None, 256):
        made = plan_graph(build, dims={"tokens": 1000}, device="h200", config={"rows": rows})
        assert check_plan(made.document) == []
