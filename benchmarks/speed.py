"""Step latency side by side: Mosaic, eager PyTorch and torch.compile over contexts and mask ratios, and the floor.

    python -m benchmarks.speed llada-8b --ctx 1k,2k,4k,8k,16k,32k,64k --mask-ratio 0.1,0.5,0.9 --minutes 9
    python -m benchmarks.speed llada-8b --ctx none --caps 24GiB,40GiB --engines eager,compile --tag limits

writes `speed-<model>-<device>[-tag].json` per model. `torch.compile` is whichever of its ways is fastest at a size: for static
shapes, the same in CUDA graphs (`reduce-overhead`), for any shape. Each compiles every size that is its own, which takes most of
the time: `--compiled reduce-overhead --engines compile --onto` adds a way to the record that a command before has written, of the
same commit on the same card.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import sources
from benchmarks.bench import ENGINES
from benchmarks.bench.inputs import masked_rows
from benchmarks.cases import Clock, options, parse_ratio, sizes, tag_of, token_counts
from benchmarks.engines import COMPILED, SpeedSettings, fastest_compiled, run
from benchmarks.engines.settings import ATTENTION
from benchmarks.floor import Floor
from benchmarks.record import command_line, environment, output_folder, table, write
from mosaic.devices import load_device
from mosaic.models import load

CONTEXTS = "1k,2k,4k,8k,16k,32k,64k"
RATIOS = "0.1,0.5,0.9"


def floor_of(result: Mapping[str, Any], point: Mapping[str, Any]) -> float:
    """Return the seconds of a point's floor, by its tokens and how many of them are masked."""
    device = load_device(result["settings"]["device"])
    return Floor(load(result["model"]).architecture, device).whole(
        point["tokens"], masked_rows(point["tokens"], point["mask_ratio"])
    )


def timings(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield each timing's name, its seconds, and its floor."""
    for point in result["points"]:
        if point["step_s"]:
            name = f"{point['engine']}, {point['tokens']:,}, {point['mask_ratio']:g}"
            yield name, point["step_s"], floor_of(result, point)


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One line per context and ratio: milliseconds of every engine, and Mosaic against the floor and the others."""
    found, points = [], result["points"]
    by_place: dict[tuple[int, float], dict[str, dict[str, Any]]] = {}
    for point in points:
        by_place.setdefault((point["tokens"], point["mask_ratio"]), {})[point["engine"]] = point
    for (tokens, ratio), engines in sorted(by_place.items()):
        step = {name: point["step_s"] for name, point in engines.items()}
        ours = engines.get("mosaic", {})
        found.append(
            (
                f"{tokens:,}", f"{ratio:g}", *(_milliseconds(engines.get(name)) for name in ENGINES),
                engines.get("compile", {}).get("compiled", "dynamic" if "compile" in engines else ""),
                _ratio(step.get("mosaic"), floor_of(result, ours) if ours else None),
                _ratio(step.get("mosaic"), ours.get("predicted_s")), _ratio(step.get("compile"), step.get("mosaic")),
                _ratio(step.get("eager"), step.get("mosaic")),
                " / ".join(str(engines[name].get("attention", {}).get("used", "")) for name in ENGINES if name in engines),
            )
        )  # fmt: skip
    return found


HEADER = (
    "tokens", "masked", "Mosaic ms", "eager ms", "compile ms", "compiled", "Mosaic / floor", "measured / predicted",
    "compile / Mosaic", "eager / Mosaic", "attention",
)  # fmt: skip


def _milliseconds(point: dict[str, Any] | None) -> str:
    if point is None:
        return ""
    return str(point["failed"]).split(":")[0] if point["failed"] else f"{point['step_s'] * 1e3:,.1f}"


def _ratio(numerator: float | None, denominator: float | None) -> str:
    return f"{numerator / denominator:.3f}" if numerator and denominator else ""


def main(argv: list[str] | None = None) -> None:
    """Measure one model after the other, writing each as it is done."""
    parser = options(__doc__)
    parser.add_argument("--ctx", default=CONTEXTS, help="contexts, or none")
    parser.add_argument("--mask-ratio", default=RATIOS, type=parse_ratio)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--compiled", default=",".join(COMPILED), help="ways to compile, in this order")
    parser.add_argument("--onto", action="store_true", help="add to the record of this name that is there")
    parser.add_argument("--attention", default="fastest", choices=ATTENTION, help="of the PyTorch engines")
    parser.add_argument("--caps", default=(), type=sizes, help="find the largest contexts in so much device memory")
    parser.add_argument("--budget", default=None, type=lambda text: sizes(text)[0], help="for Mosaic")
    parser.add_argument("--repeats", default=7, type=int)
    # everything stays on the card here, unless a host budget is given: weights that move are another benchmark
    parser.set_defaults(host_budget=0)
    arguments = parser.parse_args(argv)
    clock = Clock.start(arguments.minutes)
    for model in clock.while_left(arguments.models, print):
        settings = SpeedSettings(
            model=model,
            device=arguments.device,
            contexts=() if arguments.ctx == "none" else token_counts(arguments.ctx),
            mask_ratios=arguments.mask_ratio,
            engines=tuple(arguments.engines.split(",")),
            compiled=tuple(arguments.compiled.split(",")),
            budget=arguments.budget,
            host_budget=arguments.host_budget,
            caps=arguments.caps,
            repeats=arguments.repeats,
            attention=arguments.attention,
            seed=arguments.seed,
        )
        described = environment(
            f"median of {arguments.repeats} steps after 2 that are not counted, each engine in a process of its own"
        )
        result = run(settings, command=command_line(), progress=_progress, deadline_s=clock.left_s)
        result["environment"] |= described
        name = load(model).name
        target = f"speed-{name}-{_plain(arguments.device)}{tag_of(arguments)}"
        result = {"model": name, **result}
        if arguments.onto:
            result = added(json.loads((output_folder() / f"{target}.json").read_text()), result)
        write(target, result)
        print(f"\n{name} on {result['card']}")
        print(table(HEADER, rows_of(result)))
        for entry in result["limits"]:
            print(f"{entry['engine']} in {entry['cap_bytes'] / 2**30:g} GiB, {entry['mask_ratio']:g} masked: "
                  f"{entry['max_tokens']} tokens {entry.get('note', '')}")  # fmt: skip
        for failure in result["failures"]:
            print(f"{failure['engine']} failed: {failure['message']}")


def added(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result extended by a later run of the same commit on the same card.

    Raises
    ------
    SystemExit
        If model, card or measured sources are not the same.
    """
    for what in ("model", "card"):
        if before[what] != more[what]:
            raise SystemExit(
                f"--onto: the record there is of the {what} {before[what]}, this run of {more[what]}: measure all of it anew."
            )
    measured = before["environment"]["sources"]
    if others := sources.changed(measured):
        raise SystemExit(f"--onto: the record there is of another {', '.join(others[:3])}: measure all of it anew.")
    sources.also(measured)
    lists = {name: [*before[name], *more[name]] for name in ("engines", "limits", "failures")}
    command = f"{before['environment']['command']}; {more['environment']['command']}"
    return {
        **before, **lists, "environment": {**before["environment"], "command": command},
        "points": fastest_compiled([*before["points"], *more["points"]]), "complete": not lists["failures"],
    }  # fmt: skip


def _plain(device: str) -> str:
    return device.rsplit("/", 1)[-1].removesuffix(".toml")


def _progress(record: dict[str, Any]) -> None:
    """One line on stderr per point, so that an interrupted run has reported its measurements."""
    if "files" in record:
        sources.also(file for file in record["files"] if sources.from_root(Path(file)))
    if "step_s" in record:
        print(
            record["engine"], record["tokens"], record["mask_ratio"], record["failed"] or f"{record['step_s'] * 1e3:.2f} ms",
            file=sys.stderr, flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
