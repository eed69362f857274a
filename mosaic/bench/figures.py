"""The figures of a load, under the names of vLLM's `bench serve`, so that reports of both can be laid side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np

from mosaic.bench.client import Outcome
from mosaic.bench.traffic import Load
from mosaic.errors import UnknownName, UsageError

__all__ = ["DETAILS", "MEASURES", "PERCENTILES", "goal_of", "results"]

MEASURES: Final[Mapping[str, str]] = {
    "ttft": "to the first piece", "tpot": "for each token behind it", "itl": "between pieces", "e2el": "to the last piece",
    "client_queue_time": "from its time to its sending",
}  # fmt: skip
"""Times that are measured, in words."""
PERCENTILES: Final = (50, 90, 95, 99)
DETAILS: Final = (
    "input_lens", "output_lens", "start_times", "queue_times", "ttfts", "itls", "latencies", "errors", "memory",
)  # fmt: skip
"""Results with an entry for each request, or for each second."""
_GOALS: Final = ("ttft", "tpot", "e2el")


def results(load: Load, outcomes: Sequence[Outcome], seconds: float, counts: bool = True) -> dict[str, Any]:
    """Return the figures of a load that took `seconds`, in tokens and milliseconds; and lists with an entry for each request,
    in seconds.

    `output_throughput` is effective: the tokens of whole answers over the whole time. In `max_output_tokens_per_s` an answer's
    tokens are spread evenly over its pieces. `counts` says whether the server takes `stream_options`.
    """
    done = [one for one in outcomes if not one.error]
    tokens, prompts = sum(one.tokens for one in done), sum(one.prompt_tokens for one in done)
    found: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"), "backend": "openai-chat" if load.chat else "openai",
        "endpoint_type": "openai-chat" if load.chat else "openai", "model_id": load.model, "num_prompts": len(outcomes),
        "request_rate": "inf" if math.isinf(load.rate) else load.rate, "burstiness": load.lengths.shape,
        "max_concurrency": load.concurrency, "duration": seconds, "completed": len(done), "failed": len(outcomes) - len(done),
        "total_input_tokens": prompts, "total_output_tokens": tokens, "cached_tokens": sum(one.cached_tokens for one in done),
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(_is_good(one, load.goals) for one in done) / seconds if load.goals else None,
        "output_throughput": tokens / seconds, "total_token_throughput": (prompts + tokens) / seconds,
        "max_output_tokens_per_s": _most_a_second(done), "max_concurrent_requests": _most_at_once(done),
    }  # fmt: skip
    measures: dict[str, list[float]] = {
        "ttft": [one.ttft_s for one in done], "tpot": [one.tpot_s for one in done if one.tpot_s is not None],
        "itl": [gap for one in done for gap in one.gaps_s], "e2el": [one.latency_s for one in done],
        "client_queue_time": [one.began_s - one.due_s for one in done],
    }  # fmt: skip
    for name, values_s in measures.items():
        values = 1e3 * np.array(values_s or [0.0])
        found |= {f"{how}_{name}_ms": float(getattr(np, how)(values)) for how in ("mean", "median", "std")}
        found |= {f"p{one}_{name}_ms": float(np.percentile(values, one)) for one in PERCENTILES}
    return found | {
        "notes": _notes(done, counts),
        "input_lens": [one.prompt_tokens for one in outcomes], "output_lens": [one.tokens for one in outcomes],
        "start_times": [one.began_s for one in outcomes], "queue_times": [one.began_s - one.due_s for one in outcomes],
        "ttfts": [one.ttft_s for one in outcomes], "itls": [one.gaps_s for one in outcomes],
        "latencies": [one.latency_s for one in outcomes], "errors": [one.error for one in outcomes],
    }  # fmt: skip


def _notes(done: Sequence[Outcome], counts: bool) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if not counts:
        found.append("The server refuses stream_options; requests were sent without them.")
    if uncounted := sum(not one.counted for one in done):
        found.append(f"{uncounted} answers came without usage; their tokens are pieces, those of prompts words.")
    return found


def goal_of(text: str) -> dict[str, float]:
    """`ttft:500,tpot:50` as milliseconds by measure.

    >>> goal_of("ttft:500,e2el:2000")
    {'ttft': 500.0, 'e2el': 2000.0}
    """
    found = dict[str, float]()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        if name not in _GOALS:
            raise UnknownName("measure", name, _GOALS)
        try:
            found[name] = float(value)
        except ValueError:
            raise UsageError(f"goodput: expected milliseconds, as in ttft:500, got '{part}'.") from None
    return found


def _is_good(one: Outcome, goals: Mapping[str, float]) -> bool:
    took_s = {"ttft": one.ttft_s, "tpot": one.tpot_s or 0.0, "e2el": one.latency_s}
    return all(1e3 * took_s[name] <= most for name, most in goals.items())


def _most_a_second(done: Sequence[Outcome]) -> float:
    """The most tokens that came in one of the seconds that are counted from the first request on."""
    first_s = min((one.began_s for one in done), default=0.0)
    seconds = dict[int, float]()
    for one in done:
        at_s, share = one.began_s - first_s + one.ttft_s, one.tokens / (len(one.gaps_s) + 1)
        for gap_s in (0.0, *one.gaps_s):
            at_s += gap_s
            seconds[int(at_s)] = seconds.get(int(at_s), 0.0) + share
    return max(seconds.values(), default=0.0)


def _most_at_once(done: Sequence[Outcome]) -> int:
    """The most requests that were in flight together."""
    ends = [(one.began_s, 1) for one in done] + [(one.began_s + one.latency_s, -1) for one in done]
    live = most = 0
    for _, change in sorted(ends):
        live += change
        most = max(most, live)
    return most
