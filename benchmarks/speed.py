"""Step latency side by side: Mosaic, eager PyTorch and torch.compile over contexts and mask ratios, and the floor.

    python -m benchmarks.speed llada-8b --ctx 1k,2k,4k,8k,16k,32k,64k --mask-ratio 0.1,0.5,0.9 --minutes 9
    python -m benchmarks.speed llada-8b --ctx none --caps 24GiB,40GiB --engines eager,compile --tag limits

writes `speed-<model>-<device>[-tag].json` per model. Parts of the grid may be run apart, each under a tag of its own:
`benchmarks.report` puts them together.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.cases import Clock, options, parse_ratio, sizes, tag_of, token_counts
from benchmarks.record import command_line, table, write
from mosaic.bench import ENGINES, Settings, run
from mosaic.models import load

CONTEXTS = "1k,2k,4k,8k,16k,32k,64k"
RATIOS = "0.1,0.5,0.9"


def floor_target(tokens: int) -> float:
    """How far from the floor a step may be: 1.08 from 8K tokens on, 1.12 below."""
    return 1.08 if tokens >= 8192 else 1.12


def rows_of(points: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line per context and ratio: milliseconds of every engine, and Mosaic against the floor and the others."""
    found = []
    by_place: dict[tuple[int, float], dict[str, dict[str, Any]]] = {}
    for point in points:
        by_place.setdefault((point["tokens"], point["mask_ratio"]), {})[point["engine"]] = point
    for (tokens, ratio), engines in sorted(by_place.items()):
        step = {name: point["step_s"] for name, point in engines.items()}
        ours = engines.get("mosaic", {})
        found.append(
            (
                f"{tokens:,}", f"{ratio:g}", *(_milliseconds(engines.get(name)) for name in ENGINES),
                _ratio(step.get("mosaic"), ours.get("floor_s")), f"{floor_target(tokens):.2f}",
                _ratio(step.get("mosaic"), ours.get("predicted_s")), _ratio(step.get("compile"), step.get("mosaic")),
                _ratio(step.get("eager"), step.get("mosaic")),
                " / ".join(str(engines[name].get("attention", {}).get("used", "")) for name in ENGINES if name in engines),
            )
        )  # fmt: skip
    return found


HEADER = (
    "tokens", "masked", "Mosaic ms", "eager ms", "compile ms", "Mosaic / floor", "target", "measured / predicted",
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
    parser.add_argument("--attention", default="fastest", help="of the PyTorch engines; see `mosaic bench --help`")
    parser.add_argument("--caps", default=(), type=sizes, help="find the largest contexts in so much device memory")
    parser.add_argument("--budget", default=None, type=lambda text: sizes(text)[0], help="for Mosaic")
    parser.add_argument("--repeats", default=7, type=int)
    # everything stays on the card here, unless a host budget is given: weights that move are another benchmark
    parser.set_defaults(host_budget=0)
    arguments = parser.parse_args(argv)
    clock = Clock.start(arguments.minutes)
    for model in clock.while_left(arguments.models, print):
        settings = Settings(
            model=model,
            device=arguments.device,
            contexts=() if arguments.ctx == "none" else token_counts(arguments.ctx),
            mask_ratios=arguments.mask_ratio,
            engines=tuple(arguments.engines.split(",")),
            budget=arguments.budget,
            host_budget=arguments.host_budget,
            caps=arguments.caps,
            repeats=arguments.repeats,
            attention=arguments.attention,
            floor=True,
            seed=arguments.seed,
        )
        result = run(settings, command=command_line(), progress=_progress, deadline_s=clock.left_s)
        name = load(model).name
        write(f"speed-{name}-{_plain(arguments.device)}{tag_of(arguments)}", {"model": name, **result})
        print(f"\n{name} on {result['card']}")
        print(table(HEADER, rows_of(result["points"])))
        for entry in result["limits"]:
            print(f"{entry['engine']} in {entry['cap_bytes'] / 2**30:g} GiB, {entry['mask_ratio']:g} masked: "
                  f"{entry['max_tokens']} tokens {entry.get('note', '')}")  # fmt: skip
        for failure in result["failures"]:
            print(f"{failure['engine']} failed: {failure['message']}")


def _plain(device: str) -> str:
    return device.rsplit("/", 1)[-1].removesuffix(".toml")


def _progress(record: dict[str, Any]) -> None:
    """One line on stderr per point, so that a run that is cut off has still said what it measured."""
    if "step_s" in record:
        print(
            record["engine"], record["tokens"], record["mask_ratio"], record["failed"] or f"{record['step_s'] * 1e3:.2f} ms",
            file=sys.stderr, flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
