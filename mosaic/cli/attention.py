"""`mosaic plan --attention`: the steps of one block over kept keys, exact and sparse or reusing, side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from mosaic.cli.output import new_table, results
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.models.policies.policy import Options
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner
    from mosaic.planner.request import Request


class Asked(SimpleNamespace):
    """The options of a request that policies use: the given ones, and None for all others."""

    def __getattr__(self, name: str) -> None:
        return None


def requests_of(planner: Planner, ctx: str | None, attention: Options) -> dict[str, Request]:
    """Return the steps of one block at the end of a context: exact, and one of each kind of the policy: the block's
    first, a later one that selects again (if any), and a later one that does not."""
    from mosaic.models.parts import KEPT, Commit
    from mosaic.models.phase import Phase
    from mosaic.models.policies.policy import BlockStep
    from mosaic.models.policies.registry import policies_of
    from mosaic.planner.request import Request
    from mosaic.units import parse_tokens

    arch = planner.model.architecture
    attention.check(arch)
    if ctx is None or ctx == "auto":
        raise UsageError("--attention plans a block over the keys of a context: give one, such as --ctx 128k.")
    keys, block = parse_tokens(ctx), arch.block
    (policy,) = policies_of(Asked(attention=attention), arch)
    exact = Phase(cache=KEPT, commit=Commit(score="confidence", rule="dynamic"))
    several = 2 * block <= keys and policy.within
    kinds = attention.kinds(block)
    steps = {kind: kinds.index(kind) if kind in kinds else block - 1 for kind in ("first", "again", "later")}
    if "again" not in kinds:
        del steps["again"]
    phases = {"exact": exact}
    for kind, number in steps.items():
        step = BlockStep(start=keys - block, end=keys, number=number, steps=block, window=(keys - block, keys))
        phases[kind] = policy.phase(exact, step)
    return {
        name: Request(
            seq_lens=(min(2 * block if several and name == "first" else block, keys),), key_lens=(keys,),
            masked=min(block, keys), phase=phase,
        )
        for name, phase in phases.items()
    }  # fmt: skip


def figures(plans: dict[str, Plan]) -> dict[str, dict[str, float]]:
    """Return each step's predicted milliseconds, and its bytes: in all, of states, of selections, of the data that
    ranks keys, and of outputs kept over a prefix."""
    return {
        name: {
            "predicted_step_ms": plan.predicted_step_ms,
            "total_bytes": plan.total_bytes,
            "state_bytes": plan.components["state"],
            "selected_bytes": _bytes(plan, "state/selected", "state/pages"),
            "reused_bytes": _bytes(plan, "state/prefix_"),
        }
        for name, plan in plans.items()
    }


def _bytes(plan: Plan, *pools: str) -> int:
    return sum(size for pool, size in plan.pools.items() if pool.startswith(pools))


def report_steps(found: dict[str, dict[str, float]], attention: Options, block: int) -> None:
    """Print the steps side by side, and the time of a block with as many steps as tokens."""
    from mosaic.units import format_bytes

    kept, word = {"selection": "selected_bytes", "outputs": "reused_bytes"}, attention.adjective
    table = new_table("step", "predicted", "in all", *kept)
    table.title, table.title_justify = f"attention {attention}, one block of {block} tokens", "left"
    said = {
        "exact": "exact", "first": f"{word}, first of a block", "again": f"{word}, selects again", "later": f"{word}, later"
    }  # fmt: skip
    for name, row in found.items():
        table.add_row(
            said[name], f"{row['predicted_step_ms']:,.2f} ms", format_bytes(int(row["total_bytes"])),
            *(format_bytes(int(row[key])) for key in kept.values()),
        )  # fmt: skip
    results().print(table)
    other = sum(found[kind if kind in found else "first"]["predicted_step_ms"] for kind in attention.kinds(block))
    exact = found["exact"]["predicted_step_ms"]
    results().print(f"a block of {block} steps: {block * exact:,.1f} ms exact, {other:,.1f} ms {word}")
