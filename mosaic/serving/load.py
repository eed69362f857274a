"""Load for any server that speaks OpenAI's protocol, and what it does to its callers: `mosaic bench serve`.

Requests come as a process of random gaps (open loop), or as soon as another one ends (closed loop). Each is streamed, and timed by
the chunks that come back. Names of results are those of vLLM's `bench serve`, so that reports of both can be laid side by side.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mosaic.errors import MissingExtra, MosaicError, UnknownName, UsageError

try:
    import aiohttp
except ImportError as error:
    raise MissingExtra("aiohttp", "serve", "`mosaic bench serve`") from error

__all__ = ["TRAFFIC", "Asked", "Lengths", "Load", "Outcome", "asked", "goal_of", "measure", "results"]


class Lengths(NamedTuple):
    """Fewest and most words of prompts, and tokens of answers; and the shape of the gamma distribution of the times between
    arrivals: 1 is a Poisson process, less comes in bursts."""

    prompts: tuple[int, int]
    answers: tuple[int, int]
    shape: float = 1.0


TRAFFIC: Final[Mapping[str, Lengths]] = {
    "livebench": Lengths((300, 600), (256, 512)), "osc": Lengths((200, 500), (128, 256)),
    "burst": Lengths((100, 600), (128, 512), shape=0.5), "long": Lengths((4096, 4096), (1536, 1536)),
    "short": Lengths((64, 64), (128, 128)),
}  # fmt: skip
"""Lengths of workloads; the first three have the ranges of dLLM-Serve's figure 7, drawn evenly in their logarithms."""
_TEXT: Final = (
    "the a of to and in that was it for on with as he his at by had not are but from or have an they which one you were her all "
    "she there would their we him been has when who will more no if out so said what up its about into than them can only other new"
)
_METRICS: Final = ("denoising_steps", "canvas_positions", "committed_tokens")
_GOALS: Final = ("ttft", "tpot", "e2el")
_TIMEOUT_S: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, and how.

    Parameters
    ----------
    base_url
        Of the server, such as http://127.0.0.1:8000.
    model
        Its name there.
    lengths
        Of prompts and answers.
    requests
        How many.
    rate
        Requests a second on average; infinite: all come at once.
    concurrency
        Requests that are in flight at once, at most; None: all that have come.
    prefix
        Words that all prompts begin with.
    seed
        Of lengths, words and gaps.
    chat
        Whether chats are asked for, not completions.
    body
        Further fields of each request, such as {"ignore_eos": true}.
    key
        API key.
    goals
        Milliseconds by measure, of ttft, tpot and e2el, that a good request stays within.
    """

    base_url: str
    model: str
    lengths: Lengths
    requests: int = 100
    rate: float = math.inf
    concurrency: int | None = None
    prefix: int = 0
    seed: int = 0
    chat: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    goals: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise UsageError(f"the URL '{self.base_url}' does not begin with http:// or https://.")
        if not self.rate > 0:
            raise UsageError(f"the rate is {self.rate}; it must be above 0, or inf.")


class Asked(NamedTuple):
    """A request: when it comes, its prompt, and the tokens that it asks for."""

    at_s: float
    prompt: str
    tokens: int


def asked(load: Load) -> Iterator[Asked]:
    """Draw the requests of a load, the same for a seed."""
    rng, at_s, shape = random.Random(load.seed), 0.0, load.lengths.shape
    known = _TEXT.split()
    prefix = rng.choices(known, k=load.prefix)
    for _ in range(load.requests):
        words, tokens = (
            round(math.exp(rng.uniform(*map(math.log, ends)))) for ends in (load.lengths.prompts, load.lengths.answers)
        )
        at_s += rng.gammavariate(shape, 1 / shape) / load.rate
        yield Asked(at_s, " ".join([*prefix, *rng.choices(known, k=words)]), tokens)


@dataclass(slots=True)
class Outcome:
    """What came of a request: seconds from its sending to its first piece and to its end, the gaps between its pieces, and its
    tokens as the server counts them."""

    began_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds of each token behind the first."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None


async def measure(load: Load) -> dict[str, Any]:
    """Send a load, and return the results.

    Raises
    ------
    MosaicError
        If the server cannot be reached.
    """
    headers = {} if load.key is None else {"Authorization": f"Bearer {load.key}"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        before = await _counters(session, load)
        began = time.perf_counter()
        gate = asyncio.Semaphore(load.concurrency or load.requests)
        outcomes = await asyncio.gather(*(_one(session, load, one, began, gate) for one in asked(load)))
        seconds = time.perf_counter() - began
        after = await _counters(session, load)
    return results(load, outcomes, seconds) | _diffusion(before, after, seconds)


async def _one(
    session: aiohttp.ClientSession, load: Load, one: Asked, began: float, gate: asyncio.Semaphore
) -> Outcome:  # fmt: skip
    """Send a request when it is due, and read its answer."""
    await asyncio.sleep(began + one.at_s - time.perf_counter())
    async with gate:
        found = Outcome(began_s=time.perf_counter())
        said = {"messages": [{"role": "user", "content": one.prompt}]} if load.chat else {"prompt": one.prompt}
        body = {
            "model": load.model, **said, "max_tokens": one.tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, **load.body,
        }  # fmt: skip
        path = "chat/completions" if load.chat else "completions"
        try:
            async with session.post(f"{load.base_url}/v1/{path}", json=body) as response:
                if response.status != 200:
                    found.error = f"status {response.status}: {(await response.text())[:500]}"
                else:
                    await _read(response, found)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            found.error = f"{type(error).__name__}: {error}"
        return found


async def _read(response: aiohttp.ClientResponse, found: Outcome) -> None:
    """Time the pieces of an answer."""
    last = found.began_s
    async for line in response.content:
        text = line.decode().strip()
        if not text.startswith("data: ") or text == "data: [DONE]":
            continue
        piece, now = json.loads(text.removeprefix("data: ")), time.perf_counter()
        if "error" in piece:
            found.error = str(piece["error"].get("message", piece["error"]))
            return
        if usage := piece.get("usage"):
            found.prompt_tokens, found.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            found.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if piece.get("choices"):
            if found.ttft_s:
                found.gaps_s.append(now - last)
            else:
                found.ttft_s = now - found.began_s
            last = now
            found.latency_s = now - found.began_s
    if not found.ttft_s:
        found.error = "the answer has no piece"


async def _counters(session: aiohttp.ClientSession, load: Load) -> dict[str, float]:
    """vLLM's counters of diffusion models, where the server has them."""
    try:
        async with session.get(f"{load.base_url}/metrics") as response:
            lines = (await response.text()).splitlines() if response.status == 200 else []
    except (aiohttp.ClientError, OSError) as error:
        raise MosaicError(f"no server at {load.base_url}: {error}.") from None
    found = dict[str, float]()
    for line in lines:
        name, _, rest = line.partition("{")
        for metric in _METRICS:
            if name == f"vllm:diffusion_num_{metric}_total":
                found[metric] = found.get(metric, 0.0) + float(rest.rpartition(" ")[2])
    return found


def _diffusion(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    if not grown.get("denoising_steps"):
        return {}
    return {
        **{f"diffusion_{name}": value for name, value in grown.items()},
        "diffusion_committed_throughput": grown.get("committed_tokens", 0.0) / seconds,
        "diffusion_committed_per_step": grown.get("committed_tokens", 0.0) / grown["denoising_steps"],
    }


def results(load: Load, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return the figures of a load, under vLLM's names, in milliseconds and tokens; `details` has each request's."""
    done = [one for one in outcomes if not one.error]
    measures: dict[str, list[float]] = {
        "ttft": [1e3 * one.ttft_s for one in done],
        "tpot": [1e3 * one.tpot_s for one in done if one.tpot_s is not None],
        "itl": [1e3 * gap for one in done for gap in one.gaps_s], "e2el": [1e3 * one.latency_s for one in done],
    }  # fmt: skip
    tokens = sum(one.tokens for one in done)
    prompts = sum(one.prompt_tokens for one in done)
    found: dict[str, Any] = {
        "duration": seconds, "completed": len(done), "failed": len(outcomes) - len(done), "total_input_tokens": prompts,
        "total_output_tokens": tokens, "cached_tokens": sum(one.cached_tokens for one in done),
        "request_throughput": len(done) / seconds, "output_throughput": tokens / seconds,
        "total_token_throughput": (prompts + tokens) / seconds, "max_concurrent_requests": _most_at_once(outcomes),
    }  # fmt: skip
    if load.goals:
        found["request_goodput"] = sum(_is_good(one, load.goals) for one in done) / seconds
    for name, values in measures.items():
        if values:
            found |= {
                f"mean_{name}_ms": statistics.fmean(values), f"median_{name}_ms": statistics.median(values),
                f"std_{name}_ms": statistics.pstdev(values), f"p95_{name}_ms": _percentile(values, 0.95),
                f"p99_{name}_ms": _percentile(values, 0.99),
            }  # fmt: skip
    found["errors"] = [one.error for one in outcomes if one.error]
    found["details"] = {
        "input_lens": [one.prompt_tokens for one in outcomes], "output_lens": [one.tokens for one in outcomes],
        "ttfts": [one.ttft_s for one in outcomes], "itls": [one.gaps_s for one in outcomes],
        "e2els": [one.latency_s for one in outcomes],
    }  # fmt: skip
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


def _percentile(values: Sequence[float], share: float) -> float:
    """The least value that so many are at most, as a share."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were in flight together."""
    ends = [(one.began_s, 1) for one in outcomes] + [(one.began_s + one.latency_s, -1) for one in outcomes]
    live = most = 0
    for _, change in sorted(ends):
        live += change
        most = max(most, live)
    return most
