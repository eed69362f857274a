"""`mosaic pack`: solve an offset-assignment instance in MiniMalloc's CSV."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from mosaic.cli.completion import solver_names
from mosaic.cli.output import note, print_json, results
from mosaic.errors import MosaicError, UsageError


def pack(
    file: Annotated[
        Path | None, typer.Argument(help="id,lower,upper,size[,offset], half-open lifetimes.", metavar="INSTANCE.CSV")
    ] = None,
    solver: Annotated[
        str,
        typer.Option(
            help="auto (the portfolio) or one solver; `--solver help` lists them.", autocompletion=solver_names
        ),
    ] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds, from reading the file to the answer.")] = 60.0,
    capacity: Annotated[
        str | None, typer.Option(help="Bytes to reach, and to stop at; by default from the file name (A.1048576.csv).")
    ] = None,
    inclusive_end: Annotated[
        bool, typer.Option("--inclusive-end", help="Upper ends are last times, as MiniMalloc reads a column 'end'.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep the offsets that the file gives.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the instance with its offsets.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Give every buffer an address. Exit code 3 when a capacity is given and not reached."""
    from mosaic.cli.exports import check_targets, say_written
    from mosaic.planner.offsets import SOLVERS, names_end, read_csv, solve, validate, write_csv
    from mosaic.units import format_bytes, parse_bytes

    if solver == "help":
        for name, text in SOLVERS.items():
            results().print(f"{name:20} {text}", markup=False)
        return
    if file is None:
        raise UsageError("give an instance: mosaic pack instance.csv (`mosaic pack --solver help` lists the solvers).")
    if not 0 < timeout < float("inf"):
        raise UsageError(f"--timeout must be positive, got {timeout}.")
    check_targets([out])
    began = time.perf_counter()
    problem = read_csv(file, capacity=parse_bytes(capacity) if capacity else None, pin=pin, inclusive_end=inclusive_end)
    if names_end(file) and not inclusive_end:
        note("reading the column 'end' as half-open; MiniMalloc reads it as the last time: --inclusive-end does too.")
    reading = time.perf_counter() - began  # the answer takes about as long to check and to write
    solution = solve(problem, solver=solver, timeout_s=max(timeout - 2 * reading, timeout / 2))
    violations = validate(problem, solution)
    if violations:
        raise MosaicError(
            f"{file}: the solver {solution.solver} gave a packing that does not hold: {violations[0]}; nothing is written. "
            "Try another --solver, and please report the instance."
        )
    if out is not None:
        write_csv(out, problem, solution)
        say_written([out])
    answer = {
        "peak_bytes": solution.peak_bytes, "lower_bound_bytes": solution.lower_bound_bytes, "capacity": problem.capacity,
        "solver": solution.solver, "optimal": solution.optimal, "seconds": round(solution.seconds, 6),
    }  # fmt: skip
    missed = problem.capacity is not None and solution.peak_bytes > problem.capacity
    if as_json:
        print_json(answer)
    else:
        ratio = solution.peak_bytes / max(solution.lower_bound_bytes, 1)
        verdict = "optimal" if solution.optimal else f"{(ratio - 1) * 100:.2f} % above the lower bound"
        if solution.capacity_reached and not solution.optimal:
            verdict += f", within the capacity of {problem.capacity:,} B, where the search stopped"
        results().print(
            f"{len(problem.sizes):,} buffers: peak {solution.peak_bytes:,} B ({format_bytes(solution.peak_bytes)}), {verdict}, "
            f"by {solution.solver} in {solution.seconds:.3f} s", markup=False,
        )  # fmt: skip
    if missed and problem.capacity is not None:
        if solution.lower_bound_bytes > problem.capacity:
            note(
                f"cannot fit: buffers alive together take {solution.lower_bound_bytes:,} B, the capacity is "
                f"{problem.capacity:,} B; give --capacity {solution.lower_bound_bytes} or more."
            )
        else:
            note(
                f"capacity {problem.capacity:,} B not reached, best {solution.peak_bytes:,} B (lower bound "
                f"{solution.lower_bound_bytes:,} B); give more --timeout or another --solver."
            )
    raise typer.Exit(3 if missed else 0)
