"""What a load sends and when: requests drawn from a seed, or those of a recorded trace."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mosaic.errors import UsageError

__all__ = ["TRAFFIC", "Asked", "Lengths", "Load", "asked", "size"]


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
_TIMES: Final[Mapping[str, float]] = {"at_s": 1.0, "timestamp": 1e-3, "Timestamp": 1.0, "TIMESTAMP": 1.0}
"""Seconds of a unit of each column of times: Mosaic's own, Mooncake's, BurstGPT's, Azure's."""
_PROMPTS: Final = ("prompt", "input_length", "Request tokens", "ContextTokens")
_ANSWERS: Final = ("output_length", "Response tokens", "GeneratedTokens")
_HASHED: Final = 512
"""Tokens of a prompt that each of Mooncake's `hash_ids` stands for."""


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
    trace
        A file of recorded requests, instead of `lengths`.
    requests
        How many; of a trace the first ones, at most.
    rate
        Requests a second on average; infinite: all come at once, or as recorded.
    concurrency
        Requests that are in flight at once, at most; None: all that have come.
    warmups
        Requests that are sent before, and not measured.
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
    timeout_s
        Seconds after which a request without its whole answer has failed.
    goals
        Milliseconds by measure, of ttft, tpot and e2el, that a good request stays within.
    processes
        Processes that send; None: as many as the load needs, and the machine has cores.
    """

    base_url: str
    model: str
    lengths: Lengths
    trace: Path | None = None
    requests: int = 100
    rate: float = math.inf
    concurrency: int | None = None
    warmups: int = 0
    prefix: int = 0
    seed: int = 0
    chat: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    timeout_s: float = 3600.0
    goals: Mapping[str, float] = field(default_factory=dict)
    processes: int | None = None

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise UsageError(f"the URL '{self.base_url}' does not begin with http:// or https://.")
        for name in ("rate", "timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0.")


class Asked(NamedTuple):
    """A request: its number, when it comes, its prompt as text or token ids, the tokens that it asks for, and fields of its own."""

    number: int
    at_s: float
    prompt: str | list[int]
    tokens: int
    body: Mapping[str, Any] = MappingProxyType({})


def size(load: Load) -> int:
    """Return how many requests a load has, and see whether its trace can be read."""
    return load.requests if load.trace is None else len(_sorted(load, load.trace))


def asked(load: Load, part: int = 0, parts: int = 1) -> Iterator[Asked]:
    """Yield the requests of a load, in the order in which they come; the same for a seed. Of `parts` processes the one with the
    number `part` sends each `parts`-th of them.

    Raises
    ------
    UsageError
        If the trace cannot be read.
    """
    yield from _drawn(load, part, parts) if load.trace is None else _recorded(load, load.trace, part, parts)


def _drawn(load: Load, part: int, parts: int) -> Iterator[Asked]:
    rng, at_s, shape = random.Random(load.seed), 0.0, load.lengths.shape
    prefix = _words(f"{load.seed}", load.prefix)
    for number in range(load.requests):
        words, tokens = (
            round(math.exp(rng.uniform(*map(math.log, ends)))) for ends in (load.lengths.prompts, load.lengths.answers)
        )
        at_s += rng.gammavariate(shape, 1 / shape) / load.rate
        if number % parts == part:
            yield Asked(number, at_s, " ".join([*prefix, *_words(f"{load.seed}/{number}", words)]), tokens)


def _recorded(load: Load, path: Path, part: int, parts: int) -> Iterator[Asked]:
    """The requests of a trace, from its first one on; a finite rate stretches the times between them."""
    found = _sorted(load, path)
    first_s, last_s = found[0].at_s, found[-1].at_s
    slower = 1.0 if math.isinf(load.rate) or last_s == first_s else len(found) / load.rate / (last_s - first_s)
    prefix = _words(f"{load.seed}", load.prefix)
    for number, row in enumerate(found):
        if number % parts != part:
            continue
        prompt = row.prompt
        if isinstance(prompt, int):
            begun = [word for one in row.hashes for word in _block(load.seed, one)][:prompt]
            prompt = " ".join([*prefix, *begun, *_words(f"{load.seed}/{number}", prompt - len(begun))])
        yield Asked(number, (row.at_s - first_s) * slower, prompt, row.tokens, row.body)


class _Row(NamedTuple):
    """A line of a trace; `prompt` is a number of words, a text, or token ids."""

    at_s: float
    prompt: int | str | list[int]
    tokens: int
    hashes: Sequence[int]
    body: Mapping[str, Any]


def _sorted(load: Load, path: Path) -> list[_Row]:
    found = sorted(islice(_rows(path), load.requests), key=lambda row: row.at_s)
    if not found:
        raise UsageError(f"--trace: {path} has no request whose answer has tokens.")
    return found


def _rows(path: Path) -> Iterator[_Row]:
    """The lines of a trace whose answers have tokens."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            is_json = lines.read(1) == "{"
            lines.seek(0)
            for line in map(json.loads, filter(str.strip, lines)) if is_json else csv.DictReader(lines):
                row = _row(line)
                number += 1
                if row.tokens > 0:
                    yield row
    except OSError as error:
        raise UsageError(f"--trace: {error.strerror}: {path}.") from None
    except (ValueError, TypeError, AttributeError, csv.Error) as error:
        raise UsageError(f"--trace: {path}, behind {number} requests: {error}.") from None


def _row(line: Mapping[str, Any]) -> _Row:
    time, prompt, answer = (_first(line, names) for names in (_TIMES, _PROMPTS, _ANSWERS))
    found = line[prompt]
    if prompt == "prompt":
        texts = isinstance(found, str) or (isinstance(found, list) and {*map(type, found)} == {int})
        if not texts:
            raise ValueError("the prompt is neither text nor token ids")
    else:
        found = int(found)
    at_s = _moment(line[time]) if time == "TIMESTAMP" else float(line[time]) * _TIMES[time]
    if not math.isfinite(at_s):
        raise ValueError(f"{time} is {at_s}")
    body = line.get("extra_body") or {}
    if not isinstance(body, dict):
        raise ValueError(f"extra_body is no JSON object: {body!r}")
    return _Row(at_s, found, int(line[answer]), line.get("hash_ids") or (), body)


def _first(line: Mapping[str, Any], names: Sequence[str] | Mapping[str, float]) -> str:
    for name in names:
        if name in line:
            return name
    raise ValueError(f"expected a column of {', '.join(names)}, found {', '.join(map(str, line))}")


def _moment(text: str) -> float:
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


@lru_cache(maxsize=4096)
def _block(seed: int, hashed: int) -> list[str]:
    """The words that a hash of Mooncake's stands for, so that prompts begin alike where the recorded ones did."""
    return _words(f"{seed}/hash {hashed}", _HASHED)


def _words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(_TEXT.split(), k=max(count, 0))
