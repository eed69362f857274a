"""Fuzz for some time: `python -m tests.fuzz --minutes 10`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # what tests share is imported by plain names

from .cases import KINDS, explain, run_case
from .findings import Finding, Tally
from .working import work


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases until the time is over or something is found."""
    options = _options(arguments)
    if options.replay is not None:
        return _replay(options.kind or "programs", options.replay)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 40)
    kinds = [options.kind] if options.kind else list(KINDS)
    seconds = options.seconds if options.seconds is not None else 60 * options.minutes
    print(f"fuzzing {', '.join(kinds)} for {seconds:g} s on {options.workers} processes, seed {seed}", flush=True)
    jobs = [(kinds, seed + worker, options.workers, time.time() + seconds) for worker in range(options.workers)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        results = pool.starmap(work, jobs)
    tally, found = Tally(), [text for _, texts in results for text in texts]
    for counts, _ in results:
        tally.update(counts)
    _report(tally)
    for text in found:
        print(f"\nFOUND {text}")
    print(f"\n{len(found)} findings" if found else "\nnothing found")
    return 1 if found else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, help="instead of minutes")
    parser.add_argument("--seed", type=int, help="of the first case; a new one if not given")
    parser.add_argument("--kind", choices=list(KINDS), help="one kind only")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one case again and make it small")
    return parser.parse_args(arguments)


def _replay(kind: str, seed: int) -> int:
    try:
        run_case(kind, seed, Tally())
    except Finding as finding:
        print(explain(kind, seed, finding))
        return 1
    print(f"{kind} {seed}: nothing found")
    return 0


def _report(tally: Any) -> None:
    width = max(map(len, tally), default=0)
    for name, count in sorted(tally.items()):
        print(f"{name:{width}}  {count:>9,}")


if __name__ == "__main__":
    sys.exit(main())
