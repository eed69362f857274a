"""Check configuration, dims, implementations and mesh against each other and against the graph."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Final

from mosaic.planner.check.columns import FULL_STEP, MAIN, Columns
from mosaic.planner.check.notation import Way
from mosaic.planner.check.operators import OPERATORS

_STEP_DIMS: Final = ("tokens", "seqs", "span", "masked")
_MOST: Final = 1 << 63  # bytes or tokens that anything addresses
_NO_LENGTHS: Final = frozenset({"span", "kv_heads"})  # dims of the shipped step that no input has as its length


def check_settings(plan: Columns) -> None:
    """Check the plan's claims besides bytes."""
    _check_config(plan)
    _check_dtype(plan)
    _check_dims(plan)
    _check_implementations(plan)
    _check_declared(plan)
    _check_profile(plan)


def _check_config(plan: Columns) -> None:
    """Check regions against configuration and dims."""
    config, dims = plan.header["config"], plan.header["dims"]
    for name, region in plan.regions.items():
        loop = plan.loops[name]
        if config.get(region.knob) != loop.rows:
            rows = config.get(region.knob, "nothing")
            plan.fail("config", f"region '{name}' has {loop.rows} rows, config says {region.knob}={rows!r}")
        if dims.get(region.dim) != loop.extent:
            known = dims.get(region.dim, "nothing")
            plan.fail("dims", f"region '{name}' runs over {loop.extent} {region.dim}, dims say {known!r}")
    on = {knob for knob, rows in config.items() if type(rows) is int}
    idle = on.difference(region.knob for region in plan.regions.values())
    if idle:
        plan.fail("config", f"{', '.join(sorted(idle))}: rows without a region")


def _check_dtype(plan: Columns) -> None:
    """Check that no other dtype has more weights than the plan's."""
    weights = zip(plan.kind, plan.tensor, plan.dtype, strict=True)
    counts = Counter(dtype for kind, tensor, dtype in weights if kind == "weight" or tensor is not None)
    claimed = plan.header["dtype"]
    if counts and counts[claimed] < max(counts.values()):
        found = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(counts.items()))
        plan.fail("dtype", f"the plan is said to be in {claimed!r}, its weights are: {found}")


def _check_dims(plan: Columns) -> None:
    """Check dims against each other and the inputs."""
    document, dims = plan.header, plan.header["dims"]
    missing = [dim for dim in _STEP_DIMS if dim not in dims]
    if missing and document["phase"] == FULL_STEP:
        plan.fail("dims", f"a {FULL_STEP} has {', '.join(_STEP_DIMS)}; missing {', '.join(missing)}")
    if "tokens" not in dims or "seqs" not in dims:
        return
    tokens, seqs = dims["tokens"], dims["seqs"]
    if document["fits"] and seqs == 1 and tokens > document["max_ctx_tokens"]:
        plan.fail("context", f"max_ctx_tokens is {document['max_ctx_tokens']}, this plan fits with {tokens}")
    if document["phase"] != FULL_STEP or missing:
        return
    given = ("input", "state", *(("transient",) if "pack_requests" in plan.kernel else ()))  # that makes the inputs
    lengths = {plan.shape[b][0] for b, kind in enumerate(plan.kind) if kind in given and plan.shape[b]}
    for dim, value in dims.items():
        if dim not in _NO_LENGTHS and value + (dim == "seqs") not in lengths:
            plan.fail("dims", f"no input or state has {value} {dim}")
    least = -(-tokens // seqs)  # keys on average where sequences are equally long, by blocks at least half of them
    if any(attrs.get("block") for attrs in plan.attrs):
        least = -(-(tokens + seqs) // (2 * seqs))
    if seqs > tokens or not least <= dims["span"] <= tokens - seqs + 1:
        plan.fail("dims", f"queries in {seqs} sequences of {tokens} tokens cannot see {dims['span']} keys on average")


def _check_implementations(plan: Columns) -> None:
    """Check that a CUDA plan chooses an implementation for each kernel that has several, and a legal one."""
    chosen, backend = plan.header["implementations"], plan.header["backend"]
    several = {name: known.ways for name, known in OPERATORS.items() if known.ways}
    wanted = several.keys() & {*plan.kernel} if backend == "cuda" else set()
    if backend == "cuda" and plan.header.get("batch_invariant", False):
        wanted |= _check_invariance(plan)
        several = {name: {**known.ways, **known.invariants} for name, known in OPERATORS.items()}
    foreign = {*plan.kernel} - OPERATORS.keys()  # their implementations are their author's word
    chosen = {kernel: name for kernel, name in chosen.items() if kernel not in foreign}
    if chosen.keys() != wanted:
        text = f"chosen for {', '.join(sorted(chosen)) or 'nothing'}, on {backend} the graph needs"
        plan.fail("implementation", f"{text} {', '.join(sorted(wanted)) or 'none'}")
    for kernel, name in chosen.items():
        known = several.get(kernel, {})
        if name not in known:
            plan.fail("implementation", f"{kernel} has no {name!r}; known: {', '.join(sorted(known)) or 'none'}")
        else:
            _check_way(plan, kernel, known[name])


def _check_invariance(plan: Columns) -> set[str]:
    """Check that a CUDA plan that is said to be batch-invariant has kernels that are; return the kernels that it has to name."""
    needed = {kernel: known for kernel in {*plan.kernel} if (known := OPERATORS.get(kernel)) and known.invariant}
    for kernel, known in sorted(needed.items()):
        chosen, ways = plan.header["implementations"].get(kernel), known.invariants
        if not ways:
            plan.fail("implementation", f"the plan is said to be batch-invariant, {kernel} is not")
        elif chosen not in ways:
            text = f"{kernel} has to be {' or '.join(map(repr, ways))}, not {chosen!r}"
            plan.fail("implementation", f"the plan is said to be batch-invariant: {text}")
    return {kernel for kernel, known in needed.items() if known.invariants}


def _check_way(plan: Columns, kernel: str, way: Way) -> None:
    """Check that an implementation runs on the card and takes all launches of its kernel; the first that it does not is named."""
    card = plan.header.get("capability", 0)
    if way.capability not in (0, card):
        plan.fail(
            "implementation",
            f"{kernel} by {way.name!r} needs a card of compute capability {way.capability}, got {card}",
        )
    if not way.takes:
        return
    for i, name in enumerate(plan.kernel):
        if name == kernel and not _takes(plan, i, way):
            plan.fail("implementation", f"{plan.say_op(i)}: {way.takes}", (), (i,))
            return


def _takes(plan: Columns, i: int, way: Way) -> bool:
    operands, (name, unit, limit) = plan.operands[i], way.multiple
    (typed, dtypes), (counted, elements) = way.dtypes, way.elements
    value = plan.attrs[i].get(name)
    there = any(plan.attrs[i].get(one) or one in operands for one in way.absent)
    if type(value) is not int or there or not {*typed.split()} <= {*operands} or counted not in ("", *operands):
        return False
    return (
        0 < value <= limit
        and value % unit == 0
        and all(plan.dtype[operands[one]] in dtypes for one in typed.split())
        and (not counted or prod(plan.shape[operands[counted]]) == elements)
    )


def _check_declared(plan: Columns) -> None:
    """Check that the plan declares its streams and its kernels that are not shipped."""
    used = {"kernels": {*plan.kernel} - OPERATORS.keys(), "streams": {*plan.stream} - {MAIN}}
    for what, names in plan.header.get("declared", {}).items():
        if {*names} != used[what]:
            text = (
                f"declares {', '.join(sorted(names)) or 'none'}, its ops have {', '.join(sorted(used[what])) or 'none'}"
            )
            plan.fail(what, text)


def _check_profile(plan: Columns) -> None:
    """Check the mesh and the device's memory."""
    header = plan.header
    components, mesh = header["components"], header["mesh"]
    if mesh["size"] != prod(mesh["axes"].values()):
        plan.fail("mesh", f"{mesh['size']} devices in axes {mesh['axes']}")
    if "tensor" not in mesh["axes"]:
        plan.fail("mesh", f"no axis 'tensor' in {mesh['axes']}")
    for key in ("budget_bytes", "host_budget_bytes", "device_memory_bytes", "max_ctx_tokens"):
        if header[key] >= _MOST:
            plan.fail("limit", f"{key} is {header[key]}, more than 64-bit addresses reach")
    fixed = components["context"] + components["library"]
    if header["device_memory_bytes"] <= fixed:
        plan.fail("device", f"{header['device_memory_bytes']} bytes of memory, context and libraries take {fixed}")
