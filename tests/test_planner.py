"""The planner against hand arithmetic, brute force, and its own promises."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mosaic.errors import GraphError, PlanFormatError, UsageError
from mosaic.models import PRESETS, load
from mosaic.planner import Plan, Planner, Request, plan, plan_graph
from mosaic.planner.check import check_plan
from mosaic.planner.limits import smallest_total
from mosaic.planner.search import TOLERANCE, brute_force, search, whole_grid
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.graph import Graph
from mosaic.registrar.operator import Operator
from mosaic.registrar.polynomial import Polynomial
from mosaic.units import GIB, MIB, round_up

S, M = 131072, 65536

SHAPES = ("llada-8b", "dream-7b", "llada-moe", "sdar-8b", "llada2-mini")
"""Presets that differ in more than sizes."""
SOME = [pytest.param(name, marks=pytest.mark.soak if name in ("dream-7b", "sdar-8b") else ()) for name in SHAPES]
"""Mostly redundant cases only soak."""


@pytest.fixture(scope="module")
def llada() -> Planner:
    return Planner("llada-8b", device="rtx-3090")


def forms(planner: Planner, tokens: int = S, **knobs: int | str | None) -> dict[str, int]:
    """Bytes of each undominated live set, by the op where it occurs."""
    point = planner.space().at(Request(seq_lens=(tokens,)).size.dims())
    config = point.config(knobs)
    formula, body = point.space.variant(config).formula, point.space.variant(config).body
    return {body.ops[at].name: int(value) for at, value in zip(formula.at, point.form_values(config), strict=True)}


# -- the worked example: LLaDA-8B by hand (bf16, D 4,096, F 12,288, V 126,464) -------------------------------------

SMALL = 4 * S + 8 * M + 512  # positions, rows, cu_seqlens


def test_attention_holds_residual_q_k_v(llada: Planner) -> None:
    """32,768 S: the output overwrites q."""
    value = forms(llada, proj=128, ffn=128, logits=64)["layers.0/attention_in"]
    assert value == 32768 * S + SMALL + 8192 * 128


def test_attention_by_chunks_of_queries_holds_residual_k_v(llada: Planner) -> None:
    """24,576 S and a normed chunk with its queries: they never exist whole."""
    value = forms(llada, attention="queries", proj=128, ffn=128, logits=64)["layers.0/q_linear"]
    assert value == 24576 * S + SMALL + 2 * 8192 * 128


def test_attention_by_groups_of_heads_holds_residual_and_queries(llada: Planner) -> None:
    """17,408 S: the residual, the queries of all heads that their results overwrite, k and v of two; and a normed chunk."""
    value = forms(llada, attention="heads", heads=2, proj=128, ffn=128, logits=64)["layers.0/attention_in"]
    assert value == 17408 * S + SMALL + 8192 * 128


def test_streamed_weights_hold_a_layer_and_the_next_sublayer(llada: Planner) -> None:
    """While queries attend: their two projections, those of keys and values being spent, and the three matrices of the
    feed-forward that arrive meanwhile."""
    knobs = {"attention": "queries", "proj": 128, "ffn": 128, "logits": 64}
    resident, streamed = (forms(llada, stream=level, **knobs) for level in ("none", "layers"))
    slots = 2 * (2 * 4096**2 + 3 * 4096 * 12288)
    assert streamed["layers.0/q_linear"] == resident["layers.0/q_linear"] + slots


def test_offloaded_hidden_states_hold_windows(llada: Planner) -> None:
    """Keys and values of two heads; windows of 128 rows, two slots each, of the source and of the heads' results."""
    value = forms(llada, attention="heads", hidden="host", heads=2, proj=128, ffn=128, logits=64)
    assert value["layers.0/q_linear"] == 1024 * S + SMALL + (2 * 8192 + 8192 + 512 + 2 * 512) * 128


def test_feed_forward_holds_residual_and_one_chunk(llada: Planner) -> None:
    """8,192 S + 57,344 rows: normed chunk, gate and up."""
    value = forms(llada, proj=128, ffn=16384, logits=64)["layers.0/up"]
    assert value == 8192 * S + 57344 * 16384 + SMALL
    whole = forms(llada, logits=64)["layers.0/up"]
    assert whole == 8192 * S + 57344 * S + SMALL


def test_head_holds_residual_and_a_chunk_of_logits(llada: Planner) -> None:
    """8,192 S + 252,928 rows of logits + 8,192 rows gathered + indices and statistics."""
    value = forms(llada, proj=128, ffn=128, logits=16384)["head/logits"]
    assert value == 8192 * S + (252928 + 8192) * 16384 + 32 * M


@pytest.mark.parametrize(("attention", "per_token"), [("together", 32776), ("queries", 24584), ("heads", 16904)])
def test_max_context_of_24_gib_is_the_hand_computed_one(attention: str, per_token: int) -> None:
    """8.47 GiB left of 24 with 14.93 of weights and 0.6 fixed: 277,000 tokens with everything but attention chunked,
    more with queries or heads (one at a time) in turn as well."""
    planner = Planner("llada-8b", device="rtx-3090", budget=24 * GIB, pinned={"attention": attention})
    longest = planner.max_context(Request(seq_lens=(1,)))
    point = planner.space().at(Request(seq_lens=(1,)).size.dims())
    left = 24 * GIB - point.fixed_bytes(point.config({}))
    assert abs(longest / (left / per_token) - 1) < 0.01


# -- truth: every plan sits at its lower bound and passes the independent checker ----------------------------------

CONTEXTS = [1024, 4096, 20000, 131072, 1 << 20]


def _certify(name: str, device: str) -> None:
    planner = Planner(name, device=device)
    for tokens, ratio, budget in itertools.product(CONTEXTS, (0.05, 0.5, 1.0), (16 * GIB, 24 * GIB, 141 * GIB)):
        planner.budget_bytes = budget
        made = planner.plan(Request(seq_lens=(tokens,), mask_ratio=ratio), limit=False)
        assert made.optimal and made.peak_bytes == made.lower_bound_bytes, (tokens, ratio, budget)
        assert made.fits == (made.total_bytes <= budget)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("device", ["rtx-3090", "h200", "cpu"])
def test_plans_are_certified_optimal_across_the_grid(name: str, device: str) -> None:
    _certify(name, device)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(SHAPES)))
@pytest.mark.parametrize("device", ["rtx-3090", "h200", "cpu"])
def test_plans_of_presets_of_other_sizes_are_certified_optimal(name: str, device: str) -> None:
    _certify(name, device)


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.soak)])
def test_the_checker_accepts_every_plan(count: int) -> None:
    settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])(_accepts)()


@given(
    name=st.sampled_from(SHAPES), device=st.sampled_from(["rtx-4090", "h200", "cpu"]),
    lengths=st.lists(st.integers(1, 40000), min_size=1, max_size=5), ratio=st.fractions(Fraction(1, 100), 1),
    gib=st.integers(1, 64), dtype=st.sampled_from(["bfloat16", "float32"]), logit_rows=st.integers(0, 3),
)  # fmt: skip
def _accepts(
    name: str, device: str, lengths: list[int], ratio: Fraction, gib: int, dtype: str, logit_rows: int
) -> None:
    planner = Planner(load(name).with_dtype(dtype), device=device, budget=gib * GIB)
    request = Request(seq_lens=tuple(lengths), mask_ratio=float(ratio), logit_rows=min(logit_rows, sum(lengths)))
    made = planner.plan(request)
    assert check_plan(json.loads(made.to_json())) == []
    assert made.peak_bytes <= made.lower_bound_bytes * 1.01


@pytest.mark.some
@pytest.mark.parametrize("solver", ["first_fit", "best_fit", "greedy_by_size", "skyline"])
def test_a_named_solver_gives_a_valid_plan(llada: Planner, solver: str) -> None:
    made = llada.plan(Request(seq_lens=(4096,)), solver=solver)
    assert check_plan(made.document) == [] and made.document["solver"] == solver
    assert made.peak_bytes >= made.lower_bound_bytes


# -- search ---------------------------------------------------------------------------------------------------------


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("device", ["rtx-3090", "h200"])
def test_search_equals_brute_force(name: str, device: str) -> None:
    space = Planner(name, device=device).space()
    for tokens, ratio in ((2048, 0.9), (40000, 0.1)):
        dims = Request(seq_lens=(tokens,), mask_ratio=ratio).size.dims()
        least, whole = smallest_total(space.at(dims))[0], space.at(dims)
        everything = brute_force(whole, int(least * 1.02)).evaluations
        for slack in (0.999, 1.0, 1.02, 1.5):
            budget = int(least * slack)
            found, best = search(space.at(dims), budget), brute_force(whole, budget)  # evaluated above
            assert found.fits == best.fits == (slack >= 1)
            if found.fits:
                assert found.seconds <= best.seconds * 1.01
                assert space.at(dims).total_bytes(found.config) <= budget
                assert found.evaluations < everything


def test_a_chunk_that_costs_nothing_is_taken_though_memory_suffices() -> None:
    """On an H200 GEMMs of a few thousand rows are as fast as larger ones, so all is chunked with 100 GiB to spare."""
    made = plan("llada-8b", tokens=65536, device="h200")
    assert made.config["ffn"] and made.config["logits"] and made.config["attention"] == "queries"
    assert made.budget_bytes - made.total_bytes > 100 * GIB


def test_no_chunk_is_taken_that_costs_without_need(llada: Planner) -> None:
    """With room to spare the step is within the tolerance of the fastest configuration there is."""
    point = llada.space().at(Request(seq_lens=(8192,)).size.dims())
    result = search(point, 1 << 50)
    fastest = min(point.seconds(config) for config in whole_grid(point))
    assert result.seconds <= fastest * (1 + TOLERANCE)


def test_moves_never_raise_the_peak_they_target(llada: Planner) -> None:
    trace = llada.plan(Request(seq_lens=(262144,), mask_ratio=0.9)).document["trace"]
    lowering = [step for step in trace if "nothing gained" not in step["move"]]
    peaks = [step["peak_bytes"] for step in lowering]
    assert len(peaks) > 3 and all(b <= a for a, b in itertools.pairwise(peaks))


# -- the largest context --------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(SHAPES), device=st.sampled_from(["rtx-3090", "a100-40g", "h200"]),
    ratio=st.sampled_from([0.05, 0.3, 0.5, 1.0]), extra=st.integers(0, 60 * GIB),
)  # fmt: skip
def test_max_context_fits_and_one_more_token_does_not(name: str, device: str, ratio: float, extra: int) -> None:
    planner = Planner(name, device=device, budget=15 * GIB + extra)
    request = Request(seq_lens=(1,), mask_ratio=ratio)
    longest = planner.max_context(request)
    if longest:
        at_limit = planner.plan(Request(seq_lens=(longest,), mask_ratio=ratio))
        assert at_limit.fits and at_limit.max_ctx_tokens == longest
    assert not planner.plan(Request(seq_lens=(longest + 1,), mask_ratio=ratio)).fits


def test_max_context_is_zero_below_the_weights() -> None:
    assert Planner("llada-8b", device="h200", budget=10 * GIB).max_context(Request(seq_lens=(1,))) == 0


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("device", ["rtx-3090", "cpu"])
def test_the_printed_formula_is_the_lower_bound(name: str, device: str) -> None:
    """Its maximum, evaluated by another route, is the largest live set up to rounding each buffer to 512 B."""
    planner = Planner(name, device=device)
    for tokens, ratio in itertools.product((128, 1024, 5000, 131072), (0.01, 0.5, 1.0)):
        document = planner.plan(Request(seq_lens=(tokens,), mask_ratio=ratio)).document
        rows = {f"{knob}_rows": value for knob, value in document["config"].items() if isinstance(value, int)}
        values = [eval(form["expr"], {}, {**document["dims"], **rows}) for form in document["formula"]]
        workspace = [b for b in document["buffers"] if b["pool"] == "workspace"]
        assert max(values) <= document["lower_bound_bytes"] <= max(values) + 512 * len(workspace)


# -- families of shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_one_order_serves_every_context_and_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first packing of a variant the solver is rarely asked again, and the peak stays at the bound."""
    from mosaic.planner import placement

    solved = []
    original = placement.solve

    def counted(*args: object, **kwargs: object) -> object:
        solved.append(1)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(placement, "solve", counted)
    planner = Planner(name, device="h200")
    chunk = "experts" if name == "llada-moe" else "ffn"
    for tokens in range(2048, 400_000, 29_973):
        point = planner.space().at(Request(seq_lens=(tokens,), mask_ratio=0.4).size.dims())
        config = point.config({"proj": 256, chunk: 512, "logits": 128})
        _, peak, _ = placement.place(point, config)
        assert peak == point.lower_bound(config)
    assert len(solved) <= len(placement.REFERENCES)


# -- the artifact ---------------------------------------------------------------------------------------------------


def test_plans_round_trip_and_are_byte_identical(llada: Planner, new_process: Callable[[], None]) -> None:
    new_process()
    request = Request(seq_lens=(5000, 70), mask_ratio=0.3)
    text = llada.plan(request).to_json()
    assert Plan.from_json(text).to_json() == text
    again = Planner("llada-8b", device="rtx-3090")
    again.plan(Request(seq_lens=(123,)))
    assert again.plan(request).to_json() == text


def test_a_newer_schema_is_refused_by_name(llada: Planner) -> None:
    document = dict(llada.plan(Request(seq_lens=(64,))).document) | {"schema": "mosaic.plan/2"}
    with pytest.raises(PlanFormatError, match=r"'mosaic\.plan/2', this version reads 'mosaic.plan/1'"):
        Plan.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 3}', "not json"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanFormatError):
        Plan.from_json(text)


def test_document_says_what_the_format_promises(llada: Planner) -> None:
    document = llada.plan(Request(seq_lens=(S,))).document
    assert document["schema"] == "mosaic.plan/1" and document["config"].keys() == {
        "head", "attention", "hidden", "stream", "heads", "proj", "ffn", "logits"
    }  # fmt: skip
    assert document["components"].keys() == {"context", "library", "weights", "state", "workspace"}
    assert document["total_bytes"] == sum(document["components"].values())
    assert document["components"]["workspace"] == round_up(document["peak_bytes"], 2 * MIB)
    for region in document["regions"]:
        assert region["count"] == ceil(region["extent"] / region["rows"])
    flops = sum(op["flops"] for op in document["ops"] if op["kernel"] in ("linear", "linear_add"))
    assert flops == 2 * S * 32 * (4 * 4096**2 + 3 * 4096 * 12288) + 2 * M * 4096 * 126464
    assert next(op for op in document["ops"] if op["kernel"] == "attention")["flops"] == 4 * S * S * 4096


def test_nothing_is_left_out_as_small(llada: Planner) -> None:
    names = {b["name"] for b in llada.plan(Request(seq_lens=(1024,))).document["buffers"]}
    assert {"token_ids", "positions", "cu_seqlens", "rows", "inv_freq", "token", "confidence", "entropy"} <= names
    moe = Planner("llada-moe", device="h200").plan(Request(seq_lens=(1024,))).document["buffers"]
    assert any("sort.order" in b["name"] for b in moe) and any(b["kind"] == "scratch" for b in moe)


def test_varlen_batches_cost_attention_by_sequence(llada: Planner) -> None:
    batch = llada.plan(Request(seq_lens=(1024, 3072))).document
    assert batch["dims"]["tokens"] == 4096 and batch["dims"]["span"] == (1024**2 + 3072**2) // 4096


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_lens": (0,)}, "at least 1 token"),
        ({"seq_lens": (-5,)}, "at least 1 token"),
        ({"seq_lens": ()}, "at least one sequence"),
        ({"seq_lens": (10,), "masked": 11}, "between 1 and the 10 tokens, got 11"),
        ({"seq_lens": (10,), "masked": 0}, "between 1 and the 10"),
        ({"seq_lens": (10,), "mask_ratio": 0.0}, r"in \(0, 1\]"),
        ({"seq_lens": (10,), "mask_ratio": 1.5}, r"in \(0, 1\]"),
        ({"seq_lens": (10,), "logit_rows": 11}, "logit rows"),
        ({"seq_lens": (10.5,)}, "a context must be an integer, got 10.5"),
        ({"seq_lens": (10,), "masked": 2.5}, "masked must be an integer"),
        ({"seq_lens": (True,)}, "must be an integer, got True"),
        ({"seq_lens": (2**31,)}, "at most 2,147,483,647 tokens"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Request(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, -1, 1.5e10, float("nan"), True, "0"])
def test_budgets_are_positive_numbers_of_bytes(budget: object) -> None:
    with pytest.raises(UsageError, match="positive number of bytes"):
        Planner("llada-8b", budget=budget)  # type: ignore[arg-type]


def test_masked_rows_and_a_ratio_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="not both"):
        plan("llada-8b", tokens=100, masked=5, mask_ratio=0.5)


def test_a_chunk_as_large_as_its_dim_is_off(llada: Planner) -> None:
    made = llada.plan(Request(seq_lens=(1024,)), config={"ffn": 1 << 20, "logits": 64})
    assert made.config["ffn"] is None and made.config["logits"] == 64 and check_plan(made.document) == []


def test_contexts_of_a_billion_tokens_stay_exact(llada: Planner) -> None:
    """FLOPs exceed 64 bits; bytes do not."""
    made = Planner("llada-8b", device="h200", budget=1 << 50).plan(Request(seq_lens=(1 << 30,)))
    attention = next(op for op in made.document["ops"] if op["kernel"] == "attention")
    assert attention["flops"] == 4 * (1 << 60) * 4096 and made.fits and made.max_ctx_tokens > 1 << 30


def test_dims_are_checked_against_their_bounds(llada: Planner) -> None:
    with pytest.raises(GraphError, match="masked = 20 exceeds tokens = 10"):
        llada.space().at({"tokens": 10, "masked": 20, "seqs": 1, "span": 10})
    with pytest.raises(GraphError, match="needs a value for the dim 'span'"):
        llada.space().at({"tokens": 10, "masked": 5, "seqs": 1})


def test_a_graph_without_escalating_choices_ignores_the_host() -> None:
    """Where nothing fits, a host budget has no rungs to climb."""

    def build(g: Graph) -> None:
        x = g.input("x", (g.dim("tokens"), 64), "float32")
        g.add_op("copy", x, out=g.output("y", x.shape, "float32"))

    plan = plan_graph(build, dims={"tokens": 100}, device="cpu", budget=100, host_budget=1 << 20)
    assert not plan.fits and plan.total_bytes > 100


def test_the_largest_context_is_solved_once_for_requests_that_differ_in_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew for other rows, budgets and pinned choices: always what a planner of its own finds."""
    from mosaic.planner import planner as module

    solved = []
    solve = module.max_context
    monkeypatch.setattr(module, "max_context", lambda *args, **more: solved.append(1) or solve(*args, **more))
    made = Planner("llada-8b", device="rtx-3090")
    for tokens in (1000, 2000, 4096):
        assert made.plan(Request(seq_lens=(tokens,))).max_ctx_tokens == made.max_context(Request(seq_lens=(7,)))
    assert len(solved) == 1
    others = [
        (made, Request(seq_lens=(1000,), mask_ratio=0.1)), (made, Request(seq_lens=(1000,), masked=10)),
        (made, Request(seq_lens=(1000,), logit_rows=5)), (made.with_pinned({"head": "logits"}), Request(seq_lens=(1000,))),
    ]  # fmt: skip
    found = [planner.max_context(request) for planner, request in others]
    assert len(solved) == 1 + len(others)
    fresh = [Planner("llada-8b", device="rtx-3090").with_pinned(planner.pinned) for planner, _ in others]
    assert found == [planner.max_context(request) for planner, (_, request) in zip(fresh, others, strict=True)]


# -- graphs of one's own ----------------------------------------------------------------------------------------------

Declare = Callable[[Graph, Polynomial], object]


def _knobs(g: Graph, over: Polynomial, *names: str) -> None:
    for name in names:
        g.knob(name, over=over)


UNLIKE: dict[str, tuple[Declare, Declare, str]] = {
    "another dim": (
        lambda g, n: g.dim("rows"),
        lambda g, n: None,
        "the dims tokens, with the first options tokens, rows:",
    ),
    "dims in another order": (
        lambda g, n: (g.dim("a"), g.dim("b")),
        lambda g, n: (g.dim("b"), g.dim("a")),
        "the dims tokens, b, a, with the first options tokens, a, b",
    ),
    "a dim with another value": (
        lambda g, n: g.dim("parts", value=4),
        lambda g, n: g.dim("parts", value=8),
        r"tokens, parts \(8\), with the first options tokens, parts \(4\)",
    ),
    "a dim with a bound": (
        lambda g, n: g.dim("rows"),
        lambda g, n: g.dim("rows", at_most="tokens"),
        r"tokens, rows \(tokens\), with the first options tokens, rows:",
    ),
    "no knob": (
        lambda g, n: g.knob("body", over=n, tile=16),
        lambda g, n: None,
        r"the chunk knobs none, with the first options body \(tokens, 16\): declare them ahead .* g\.knob",
    ),
    "knobs in another order": (
        lambda g, n: _knobs(g, n, "a", "b"),
        lambda g, n: _knobs(g, n, "b", "a"),
        r"the chunk knobs b \(tokens, 128\), a \(tokens, 128\)",
    ),
    "a knob with another tile": (
        lambda g, n: g.knob("a", over=n, tile=16),
        lambda g, n: g.knob("a", over=n, tile=32),
        r"a \(tokens, 32\), with the first options a \(tokens, 16\)",
    ),
    "another choice": (
        lambda g, n: None,
        lambda g, n: g.choice("inner", ("c", "d")),
        "the choices other .*, way .*, inner .*, with the first options other .*, way [^,]*, [^,]*: declare",
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_options_that_declare_other_dims_knobs_or_choices_are_refused(case: str) -> None:
    """Bodies of a template share them, in order: their sizes are polynomials of the same variables."""
    first, second, message = UNLIKE[case]

    def build(g: Graph) -> None:
        tokens = g.dim("tokens")
        g.choice("other", ("x", "y"))
        (first if g.choice("way", ("a", "b")) == "a" else second)(g, tokens)
        x = g.input("x", (tokens, 64), "float32")
        g.add_op("linear", x, g.weight("w", (64, 64), "float32"), out=g.output("y", (tokens, 64), "float32"))

    with pytest.raises(GraphError, match=f"custom with way=b declares .*{message}"):
        plan_graph(build, dims={"tokens": 100, "rows": 3, "a": 1, "b": 2}, device="cpu")


MIX = Operator(name="mix", operands="x:a[*T] w:b[*S] -> y:a[*T]")
DTYPES = ("float64", "float32", "bfloat16", "int8")


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_says_the_dtype_of_most_of_the_weights_that_it_has(seed: int) -> None:
    """Bytes of weights, of host memory and of others, under each option of a choice, as the checker counts them."""

    def build(g: Graph) -> None:
        way = g.choice("way", ("a", "b"))
        rng, tokens = random.Random(f"{seed} {way}"), g.dim("tokens")
        x = g.input("x", (tokens, 64), "float32")
        for i in range(rng.randrange(1, 8)):
            kind: Any = rng.choice(("weight", "host", "external"))
            tensor = None if kind == "weight" else f"t{i}"
            w = g.buffer(f"w{i}", (64, 64), rng.choice(DTYPES), kind=kind, tensor=tensor)
            g.add_op(MIX, x, w, name=f"op{i}")
        g.add_op(MIX, x, x, out=g.output("y", (tokens, 64), "float32"))

    for way in ("a", "b"):
        made = plan_graph(build, dims={"tokens": 100}, device="cpu", host_budget="1GiB", config={"way": way})
        assert [str(v) for v in check_plan(made.document)] == []


def test_every_dtype_that_can_be_registered_can_be_checked() -> None:
    def build(g: Graph) -> None:
        tokens = g.dim("tokens")
        x = g.input("x", (tokens, 64), "float32")
        for dtype in ITEMSIZE:
            g.add_op(MIX, x, g.weight(dtype, (64, 64), dtype), name=f"op_{dtype}")
        g.add_op(MIX, x, x, out=g.output("y", (tokens, 64), "float32"))

    made = plan_graph(build, dims={"tokens": 100}, device="cpu")
    assert check_plan(made.document) == [] and {b["dtype"] for b in made.document["buffers"]} == set(ITEMSIZE)
