"""What a server's status page shows: the last minutes of its engine, and its canvases as they fill in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mosaic.decoding.forecast import Forecast
from mosaic.decoding.text import token_texts

if TYPE_CHECKING:
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.serving.messages import Canvas, Picture, Stepped

__all__ = ["Watch"]

_KEPT: Final = 300
_EVERY_S: Final = 1.0


class _Sample(NamedTuple):
    """A second: when it ended, requests that ran and waited, tokens a second, and bytes by pool."""

    at_s: float
    running: int
    waiting: int
    tokens_s: float
    memory: Mapping[str, tuple[int, int]]


class Watch:
    """Keeps what an engine told of late.

    Attributes
    ----------
    steps, tokens
        Of the engine, in all.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._samples = deque[_Sample](maxlen=_KEPT)
        self._began_s = time.monotonic()
        self._counted = 0
        self._last: Stepped | None = None
        self._picture: Picture | None = None
        self.steps = self.tokens = 0

    def stepped(self, step: Stepped) -> None:
        """Note a step."""
        now, tokens = time.monotonic(), step.tokens
        self.steps += step.running > 0 or bool(step.fresh)
        self.tokens += tokens
        self._counted += tokens
        if step.picture is not None:
            self._picture = step.picture
        idle = self._last is None or not self._last.running
        self._last = step
        if (spent := now - self._began_s) >= _EVERY_S:
            if idle and self._samples:  # nothing ran since
                last = self._samples[-1]
                self._samples.append(last._replace(at_s=now - _EVERY_S, running=0, waiting=0, tokens_s=0.0))
            seconds = _EVERY_S if idle else spent
            self._samples.append(_Sample(now, step.running, step.waiting, self._counted / seconds, step.memory))
            self._began_s, self._counted = now, 0

    def status(self, owner: str) -> dict[str, Any]:
        """Return all of it as JSON, of canvases those of one owner: times in seconds before now."""
        now, picture, last = time.monotonic(), self._picture, self._last
        running, waiting = (last.running, last.waiting) if last is not None else (0, 0)
        outlook = picture.outlook if picture is not None and running else None
        rate = self._samples[-1].tokens_s if self._samples and running else 0.0
        canvases = picture.canvases if picture is not None and running else ()
        samples = [*self._samples, _Sample(now, running, waiting, rate, last.memory)] if last is not None else []
        return {
            "steps": self.steps, "tokens": self.tokens, "running": running, "waiting": waiting, "tokens_s": rate,
            "memory": {pool: {"planned": sizes[0], "committed": sizes[1]} for pool, sizes in last.memory.items()} if last else {},
            "history": [
                {
                    "ago_s": round(now - one.at_s, 2), "running": one.running, "waiting": one.waiting,
                    "tokens_s": round(one.tokens_s, 1), "memory": {pool: sizes[1] for pool, sizes in one.memory.items()},
                }
                for one in samples
            ],
            "rows": dict(picture.rows) if picture is not None else {}, "plan": picture.plan if picture is not None else None,
            "canvases": [self._drawn(one) for one in canvases if one.owner == owner],
            "outlook": _said(outlook),
        }  # fmt: skip

    def _drawn(self, canvas: Canvas) -> dict[str, Any]:
        """A canvas with texts for tokens, null where nothing is decided; characters are not split within a run of tokens."""
        texts: list[str | None] = []
        for open_, found in groupby(canvas.ids, key=lambda token: token < 0):
            run = [*found]
            texts += [None] * len(run) if open_ else token_texts(self._decode, run)
        return {
            "number": canvas.number, "prompt_tokens": canvas.prompt_tokens, "length": canvas.length, "steps": canvas.steps,
            "masked": canvas.masked, "first": canvas.first, "texts": texts,
        }  # fmt: skip

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _said(outlook: Forecast | str | None) -> str:
    """When the next prompt has room."""
    if outlook is None or isinstance(outlook, str):
        return outlook or ""
    if outlook.fits == "now":
        return "The next request has room in the next step."
    return "The next request has room when others end." if outlook.steps is None else (
        f"The next request has room in {outlook.steps:,} steps at most."
    )  # fmt: skip
