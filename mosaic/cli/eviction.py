"""`mosaic plan --eviction`: blocks over kept keys, whole, and cut into two graphs, the second in several sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mosaic.cli.attention import Asked
from mosaic.cli.output import new_table, results
from mosaic.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from mosaic.models.policies.policy import Options
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner
    from mosaic.planner.request import Request


def block_of(planner: Planner, ctx: str | None, seq_lens: str | None) -> Request:
    """Return a step of one block at the end of each context."""
    from mosaic.models.parts import KEPT, Commit
    from mosaic.models.phase import Phase
    from mosaic.planner.request import Request
    from mosaic.units import parse_lengths, parse_tokens

    if (ctx is None) == (seq_lens is None) or ctx == "auto":
        raise UsageError(
            "--eviction plans a block over the keys of each context: give one (--ctx 1k) or several (--seq-lens 1k,2k)."
        )
    keys = parse_lengths(seq_lens) if seq_lens is not None else (parse_tokens(str(ctx)),)
    windows = tuple(min(planner.model.architecture.block, seen) for seen in keys)
    phase = Phase(cache=KEPT, commit=Commit(score="confidence", rule="dynamic"))
    return Request(seq_lens=windows, key_lens=keys, masked=sum(windows), phase=phase)


def cut_of(planner: Planner, step: Request, eviction: Options, block_cache: str | None) -> tuple[Request, Request]:
    """Return a step of blocks whole and with eviction; with a block cache, over windows of non-adjacent tokens."""
    from dataclasses import replace

    from mosaic.models.policies.block_cache import BLOCK_CACHES
    from mosaic.models.policies.policy import BlockStep
    from mosaic.models.policies.registry import policies_of

    if block_cache not in (None, *BLOCK_CACHES):
        raise UnknownName("block_cache", block_cache, BLOCK_CACHES)
    arch, phases = planner.model.architecture, [step.phase]
    made = BlockStep(start=0, end=arch.block, number=0, steps=1, window=(0, arch.block))
    for policy in policies_of(Asked(eviction=eviction, block_cache=block_cache, block_length=arch.block), arch):
        phases.append(policy.phase(phases[-1], made))
    *_, phase, cut = phases
    own = {state: len(step.key_lens) for state in cut.states if state not in phase.states}
    whole = replace(step, phase=phase, states=own)
    return whole, replace(whole, phase=cut)


def figures(whole: Plan, graphs: list[Plan]) -> dict[str, dict[str, float]]:
    """Return, for each graph, its tokens, predicted milliseconds and bytes."""
    return {
        name: {
            "tokens": plan.dims.get("kept", plan.dims["tokens"]),
            "predicted_ms": plan.predicted_step_ms,
            "total_bytes": plan.total_bytes,
        }
        for name, plan in {"whole": whole, **{_name(plan): plan for plan in graphs}}.items()
    }


def _name(plan: Plan) -> str:
    return f"suffix_{plan.dims['kept']}" if "kept" in plan.dims else "prefix"


def pays_up_to(found: dict[str, dict[str, float]]) -> int:
    """Return the most tokens that a cut step may keep and still be faster than the whole step; 0: it never is."""
    from mosaic.planner import cut_steps

    suffixes = {int(row["tokens"]): row["predicted_ms"] for name, row in found.items() if name.startswith("suffix")}
    return cut_steps.pays_up_to(found["whole"]["predicted_ms"], found["prefix"]["predicted_ms"], suffixes)


def report_graphs(found: dict[str, dict[str, float]], eviction: Options) -> None:
    """Print the graphs side by side, the time of a step that keeps as many tokens as each second graph has room for,
    and whether that is less than the whole step's."""
    from mosaic.units import format_bytes

    table = new_table("graph", "tokens", "predicted", "step", "in all")
    table.title, table.title_justify = f"eviction {eviction}", "left"
    for name, row in found.items():
        step = row["predicted_ms"] + (found["prefix"]["predicted_ms"] if name.startswith("suffix") else 0)
        table.add_row(
            name.partition("_")[0], f"{row['tokens']:,.0f}", f"{row['predicted_ms']:,.2f} ms",
            "" if name == "prefix" else f"{step:,.2f} ms", format_bytes(int(row["total_bytes"])),
        )  # fmt: skip
    results().print(table)
    whole, up_to = found["whole"], pays_up_to(found)
    if up_to:
        results().print(
            f"it pays where a step keeps at most {up_to:,} of {whole['tokens']:,.0f} tokens", soft_wrap=True
        )
        return
    least = found["prefix"]["predicted_ms"] + min(
        row["predicted_ms"] for name, row in found.items() if name.startswith("suffix")
    )
    results().print(
        f"it does not pay here: a step takes {least:,.2f} ms at least, and {whole['predicted_ms']:,.2f} ms whole; leave it out, or "
        "let more requests share a step",
        soft_wrap=True,
    )
