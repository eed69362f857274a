"""Results against a float32 reference on the same weights: eager PyTorch in the model's dtype, and every plan variant.

    python -m benchmarks.same_results llada-8b --ctx 4k --minutes 8

The reference is the official arithmetic in float32 on the rounded weights. For eager PyTorch and each variant of Mosaic
(chunked, split, streamed, offloaded, not captured, poisoned): argmax agreement, relative error of the logits of some rows and of
the confidences, whether the bits are those of the first variant, and whether a second run repeats them. Writes
`same-<model>-<device>[-tag].json`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.ablation import fixed_choices, split_attention
from benchmarks.cases import Clock, cut, options, parse_ratio, tag_of
from benchmarks.record import environment, table, write
from mosaic.devices import Device, load_device
from mosaic.models import Model, load
from mosaic.planner import Planner, Request
from mosaic.units import parse_tokens

LOGIT_ROWS = 256

Results = dict[str, Any]
"""`logits` [R, V] of chosen rows, `token` [M] and `confidence` [M] of the masked ones, on the CPU."""


def of_torch(model: Model, inputs: Any, device: Device, seed: int, *, reference: bool) -> Results:
    """The official step, eager, in the model's dtype or on the same weights in float32."""
    import torch

    from benchmarks.bench.baselines import Transformer, grouped_products
    from benchmarks.bench.torch_engine import fill
    from benchmarks.engines.sdpa import using

    where = torch.device("cuda" if device.backend == "cuda" else "cpu")
    dtype = getattr(torch, model.architecture.dtype)
    wide = model.family == "llada"
    grouped = bool(model.architecture.feed_forward.experts) and grouped_products(dtype, where)
    network = Transformer(
        model.architecture, device=where, wide_rotary=wide, experts="grouped" if grouped and not reference else "loop"
    )
    fill(network.tensors, model, seed)
    if reference:
        network.dtype, network.tensors = torch.float32, {}
        network.float()
    ids = inputs.token_ids[None].to(where)
    rows = (inputs.token_ids == model.architecture.mask_token_id).nonzero()[:, 0]
    # attention of the reference in plain products: fused kernels may round float32 on the way
    with torch.no_grad(), using("math" if reference else None):
        logits = network.logits(ids)[0]
        if model.architecture.shifted:
            logits = torch.cat([logits[:1], logits[:-1]])
        found = {"logits": logits[rows[:LOGIT_ROWS].to(where)].float().cpu()}
        del logits
        token, confidence = network(ids)
    return {**found, "token": token.cpu(), "confidence": confidence.double().cpu()}


def of_mosaic(
    model: Model, inputs: Any, device: Device, host_budget: int, seed: int, variant: Mapping[str, Any]
) -> Results:
    """One variant of Mosaic, twice."""
    import torch

    import mosaic

    rows = (inputs.token_ids == model.architecture.mask_token_id).nonzero()[:, 0]

    def results(step: Any) -> Results:
        step = step.clone()  # on a CPU, `.cpu()` would be a view of memory that is about to go
        return {
            "logits": step.logits.float().cpu(), "token": step.token_ids.cpu(), "confidence": step.confidence.double().cpu()
        }  # fmt: skip

    options = {name: value for name, value in variant.items() if name != "config"}
    with mosaic.compile(model, device=device, host_budget=host_budget, seed=seed, **options) as compiled:
        step = compiled(inputs.token_ids, logits_for=rows[:LOGIT_ROWS], config=variant["config"])
        first, in_force = results(step), dict(step.plan.config)
        second = results(compiled(inputs.token_ids, logits_for=rows[:LOGIT_ROWS], config=variant["config"]))
    same = all(torch.equal(first[name], second[name]) for name in first)
    return {**first, "repeatable": same, "in_force": in_force}


def errors(found: Results, reference: Results) -> dict[str, float]:
    """Argmax agreement and relative errors against the reference."""
    logits, expected = found["logits"].double(), reference["logits"].double()
    confidence, wanted = found["confidence"], reference["confidence"]
    return {
        "argmax_agreement": float((found["token"] == reference["token"]).double().mean()),
        "logits_error": float((logits - expected).norm() / expected.norm()),
        "logits_worst": float((logits - expected).abs().max() / expected.abs().max()),
        "confidence_error": float(((confidence - wanted).abs() / wanted).mean()),
        "confidence_worst": float(((confidence - wanted).abs() / wanted).max()),
    }


def variants(model: Model, inputs: Any, device: Device, host_budget: int) -> dict[str, dict[str, Any]]:
    """Arguments of `compile` by name; each is one change from the fastest plan without moves."""
    planner = Planner(model, device=device, host_budget=host_budget, pinned=fixed_choices(model, device))
    request = Request(seq_lens=(inputs.tokens,), masked=inputs.masked, logit_rows=min(LOGIT_ROWS, inputs.masked))
    fastest = dict(planner.plan(request).config)
    chunks = {knob: 256 for knob, value in fastest.items() if not isinstance(value, str) and knob != "heads"}
    split = split_attention(model, device)
    return {
        "fastest": {"config": fastest},
        "again": {"config": fastest},
        "not captured": {"config": fastest, "capture": False},
        "poisoned": {"config": fastest, "debug": "poison"},
        "weights streamed": {"config": {**fastest, "stream": "all"}},
        "hidden states offloaded": {"config": {**fastest, "hidden": "host"}},
        "chunked": {"config": {**fastest, **chunks}},
        "head fused": {"config": {**fastest, "head": "fused"}},
        "attention split": {"config": {**fastest, **split}},
        "all together": {"config": {**fastest, **chunks, **split, "stream": "all", "hidden": "host"}},
    }


HEADER = (
    "engine", "argmax agreement", "logits, relative error", "worst", "confidence, relative error", "worst",
    "logits error / eager's", "confidence error / eager's", "bits of the fastest", "repeatable",
)  # fmt: skip


def rows_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line per engine or variant."""
    shown = []
    for row in rows:
        if row.get("failed"):
            shown.append((row["name"], row["failed"], *[""] * 8))
            continue
        ratios = (row.get(name) for name in ("logits_error_over_eager", "confidence_error_over_eager"))
        flags = (row.get(name) for name in ("same_bits", "repeatable"))
        shown.append(
            (
                row["name"], f"{row['argmax_agreement']:.4f}", f"{row['logits_error']:.3e}", f"{row['logits_worst']:.3e}",
                f"{row['confidence_error']:.3e}", f"{row['confidence_worst']:.3e}",
                *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
                *("" if flag is None else "yes" if flag else "no" for flag in flags),
            )
        )  # fmt: skip
    return shown


def over_eager(found: Mapping[str, float], eager: Mapping[str, float]) -> dict[str, float | None]:
    """Errors as ratios to eager PyTorch's own; None where that has none (float32)."""
    names = ("logits_error", "confidence_error")
    return {f"{name}_over_eager": found[name] / eager[name] if eager[name] else None for name in names}


def compare(model: Model, arguments: Any, device: Device, clock: Clock) -> list[dict[str, Any]]:
    """All engines and variants against the reference."""
    import torch

    from benchmarks.bench.inputs import make_inputs
    from mosaic.errors import MosaicError

    inputs = make_inputs(model.architecture, arguments.ctx, arguments.mask_ratio, arguments.seed)

    def free() -> None:
        gc.collect()
        if device.backend == "cuda":
            torch.cuda.empty_cache()

    reference = of_torch(model, inputs, device, arguments.seed, reference=True)
    free()
    eager = errors(of_torch(model, inputs, device, arguments.seed, reference=False), reference)
    free()
    rows: list[dict[str, Any]] = [{"name": f"eager PyTorch, {model.architecture.dtype}", **eager}]
    known = variants(model, inputs, device, arguments.host_budget)
    first: Results | None = None
    for name in clock.while_left([n for n in known if not arguments.only or n in arguments.only.split(",")], print):
        try:
            found = of_mosaic(model, inputs, device, arguments.host_budget, arguments.seed, known[name])
        except MosaicError as error:
            rows.append({"name": name, "failed": str(error), **known[name]})
            continue
        first = first or found
        measured = errors(found, reference)
        rows.append(
            {
                "name": name, **known[name], "in_force": found["in_force"], **measured, "repeatable": found["repeatable"],
                "same_bits": all(torch.equal(found[key], first[key]) for key in ("logits", "token", "confidence")),
                **over_eager(measured, eager),
            }
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
        free()
    return rows


def main(argv: list[str] | None = None) -> None:
    """Compare one model after the other."""
    from benchmarks.bench.meters import card

    parser = options(__doc__)
    parser.add_argument("--ctx", default=4096, type=parse_tokens)
    parser.add_argument("--mask-ratio", default=0.5, type=lambda text: parse_ratio(text)[0])
    parser.add_argument("--layers", default=None, type=int)
    parser.add_argument("--only", default="", help="variants, by name, with commas; all if not given")
    arguments = parser.parse_args(argv)
    device, clock = load_device(arguments.device), Clock.start(arguments.minutes)
    for name in clock.while_left(arguments.models, print):
        model, described = cut(load(name), arguments.layers), environment("computed, nothing is timed")
        rows = compare(model, arguments, device, clock)
        result = {
            "environment": described, "card": card(device.backend == "cuda"), "model": model.name, "tokens": arguments.ctx,
            "mask_ratio": arguments.mask_ratio, "rows": rows,
        }  # fmt: skip
        write(f"same-{load(name).name}-{device.name}{tag_of(arguments)}", result)
        print(f"\n{model.name}, {arguments.ctx:,} tokens, {arguments.mask_ratio:g} masked, against float32")
        print(table(HEADER, rows_of(rows)))


if __name__ == "__main__":
    main()
