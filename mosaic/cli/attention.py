"""`mosaic plan --attention`: the steps of one block over kept keys, exact and sparse or reusing, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mosaic.cli.output import results
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.models.parts import CachePolicy
    from mosaic.models.reuse import PrefixReuse
    from mosaic.models.sparse import SparseAttention
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner
    from mosaic.planner.request import Request

__all__ = ["figures", "report_steps", "requests_of"]


def requests_of(planner: Planner, ctx: str | None, attention: SparseAttention | PrefixReuse) -> dict[str, Request]:
    """Return the steps of one block at the end of a context: exact, the block's first, one that selects again where there are
    such, and a later one."""
    from mosaic.models.parts import KEPT, Commit
    from mosaic.models.phase import Phase
    from mosaic.planner.request import Request
    from mosaic.units import parse_tokens

    arch = planner.model.architecture
    attention.check(arch)
    if ctx is None or ctx == "auto":
        raise UsageError("--attention plans a block over the keys of a context: give one, such as --ctx 128k.")
    keys, commit = parse_tokens(ctx), Commit(score="confidence", rule="dynamic")
    several = 2 * arch.block <= keys and getattr(attention, "selects", "first") == "first"
    windows = {"first": 2 * arch.block} if several else {}
    caches: dict[str, CachePolicy] = {"exact": KEPT, "first": _policy(attention, first=True)}
    if "again" in _kinds(attention, arch.block):
        caches["again"] = _policy(attention, first=True, refreshes=False)
    caches["later"] = _policy(attention, first=False)
    return {
        name: Request(
            seq_lens=(min(windows.get(name, arch.block), keys),), key_lens=(keys,), masked=min(arch.block, keys),
            phase=Phase(cache=cache, commit=commit),
        )
        for name, cache in caches.items()
    }  # fmt: skip


def _policy(attention: SparseAttention | PrefixReuse, *, first: bool, refreshes: bool = True) -> CachePolicy:
    """How a block's first step attends, or a later one; `refreshes`, whether the first does where there is reuse."""
    from mosaic.models.parts.reused import Reused
    from mosaic.models.parts.selected import Selected
    from mosaic.models.sparse import SparseAttention

    if not isinstance(attention, SparseAttention):
        return Reused(reuse=attention, refreshes=first)
    selects = first or attention.selects == "every"
    return Selected(attention=attention, selects=selects, refreshes=first and refreshes and attention.reuse is not None)


def figures(plans: dict[str, Plan]) -> dict[str, dict[str, float]]:
    """Return of each step its predicted milliseconds and its bytes: in all, of states, and of what is selected, by what; and of
    what is kept of the attention to a prefix."""
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


def report_steps(found: dict[str, dict[str, float]], attention: SparseAttention | PrefixReuse, block: int) -> None:
    """Print the steps side by side, and what a block of as many steps as tokens takes."""
    from rich.table import Table

    from mosaic.models.sparse import SparseAttention
    from mosaic.units import format_bytes

    sparse = isinstance(attention, SparseAttention)
    table = Table(
        box=None, padding=(0, 2), title=f"attention {attention}, one block of {block} tokens", title_justify="left"
    )
    kept = {"selection": "selected_bytes", "outputs": "reused_bytes"}
    for name in ("step", "predicted", "in all", *kept):
        table.add_column(name, justify="left" if name == "step" else "right")
    word = "sparse" if sparse else "reusing"
    said = {
        "exact": "exact", "first": f"{word}, first of a block", "again": f"{word}, selects again", "later": f"{word}, later"
    }  # fmt: skip
    for name, row in found.items():
        table.add_row(
            said[name], f"{row['predicted_step_ms']:,.2f} ms", format_bytes(int(row["total_bytes"])),
            *(format_bytes(int(row[key])) for key in kept.values()),
        )  # fmt: skip
    results().print(table)
    taken = _kinds(attention, block)
    other = sum(found[name if name in found else "first"]["predicted_step_ms"] for name in taken)
    exact = found["exact"]["predicted_step_ms"]
    results().print(f"a block of {block} steps: {block * exact:,.1f} ms exact, {other:,.1f} ms {word}")


def _kinds(attention: SparseAttention | PrefixReuse, steps: int) -> list[str]:
    """What each step of a block is: like its first, one that selects again, or a later one."""
    from mosaic.models.sparse import SparseAttention

    chosen, reuse = (attention, attention.reuse) if isinstance(attention, SparseAttention) else (None, attention)
    kinds = []
    for step in range(steps):
        refreshes = reuse is not None and step % (reuse.steps or steps) == 0
        selects = chosen is not None and chosen.selects_in(step, steps)
        every = chosen is not None and chosen.selects == "every"  # a block's first step is like the others then
        kinds.append("first" if refreshes or (selects and (every or not step)) else "again" if selects else "later")
    return kinds
