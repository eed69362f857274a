"""An answer as it becomes final, as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import chain
from typing import TYPE_CHECKING, Any

from mosaic.serving.protocol import error_body

if TYPE_CHECKING:
    from mosaic.serving.answers import Answers, Piece
    from mosaic.serving.endings import Ending
    from mosaic.serving.protocol import Reply

__all__ = ["events"]


async def events(
    first: list[Piece], others: AsyncGenerator[list[Piece], None], answers: Answers, reply: Reply,
    ending: Callable[[Exception], Ending],
) -> AsyncIterator[str]:  # fmt: skip
    """Yield the text of events to send, each time of all that is known by then, since each is a system call.

    Parameters
    ----------
    first, others
        What `answers.pieces()` yields; `others` is closed at the end.
    ending
        What the caller is told of an error.
    """
    said, shown = "", set[int]()
    async with aclosing(others):
        try:
            async for pieces in _after(first, others):
                said += "".join(chain.from_iterable(_told(piece, answers, reply, shown) for piece in pieces))
                if None in answers.reasons:  # the last ones go out with the end
                    yield said
                    said = ""
        except Exception as error:
            told = ending(error)
            said += _event(error_body(told.message, told.kind, told.status))
    usage = _event(reply.last(answers.usage)) if reply.question.with_usage else ""
    yield f"{said}{usage}data: [DONE]\n\n"


def _told(piece: Piece, answers: Answers, reply: Reply, shown: set[int]) -> Iterator[str]:
    """Give the events of a piece; `shown` are the answers that have had one."""
    index, text, scores, reason = piece
    if index not in shown and reply.question.chat:
        yield _event(reply.piece(index, "", role=True))
    shown.add(index)
    if text or scores:
        yield _event(reply.piece(index, text, scores=scores))
    if (frame := answers.frames.pop(index, None)) is not None:
        yield _event(reply.frame(index, frame))
    if reason is not None:
        yield _event(reply.piece(index, reason=reason))


async def _after(first: list[Piece], others: AsyncIterator[list[Piece]]) -> AsyncIterator[list[Piece]]:
    yield first
    async for one in others:
        yield one


def _event(found: dict[str, Any]) -> str:
    return f"data: {json.dumps(found, ensure_ascii=False)}\n\n"
