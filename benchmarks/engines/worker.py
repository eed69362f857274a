"""One engine in a process of its own, as `benchmarks.bench.worker`, and then its largest contexts."""

from __future__ import annotations

from itertools import product

from benchmarks.bench.worker import Emit, serve, work
from benchmarks.engines.mosaic_engine import MeasuredEngine
from benchmarks.engines.settings import SpeedSettings
from benchmarks.engines.torch_engine import TunedEngine


def main(name: str, text: str, emit: Emit) -> None:
    """Measure an engine."""
    settings = SpeedSettings.from_json(text)
    engine: MeasuredEngine | TunedEngine
    if name == "mosaic":
        engine = MeasuredEngine(settings)
    else:
        engine = TunedEngine(settings, compiled=settings.compiled[0] if name == "compile" else None)
    work(engine, settings, emit)
    ratios = settings.mask_ratios if engine.ratio_matters else settings.mask_ratios[:1]
    for cap, ratio in product(settings.caps, ratios):
        found = engine.largest_context(cap, ratio)
        emit({"record": "limit", "cap_bytes": cap, "mask_ratio": ratio, **found})
    engine.close()


if __name__ == "__main__":
    serve(main)
