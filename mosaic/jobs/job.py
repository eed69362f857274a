"""A job: requests from a file, answers into a file, as many at once as are admitted, and again where it was left."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.decoding.session import Session
from mosaic.decoding.stream import MOST_LIVE, Stream
from mosaic.errors import UsageError
from mosaic.jobs.lines import AnswersFile, distinct, lines_of, opened, unanswered
from mosaic.jobs.progress import Progress
from mosaic.jobs.requests import Asked, Requests
from mosaic.runtime.interrupts import interrupts_held, interrupts_let_through
from mosaic.runtime.range_pool import ClosesOnExit

if TYPE_CHECKING:
    from mosaic.decoding.live import Submission
    from mosaic.models import Model
    from mosaic.runtime.compiled import CompiledModel

__all__ = ["Job", "Tally"]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a job has done since it was started.

    Parameters
    ----------
    answered, refused, bad
        Lines that were answered, those of them whose answer is an error, and lines that are no requests.
    tokens, forwards, seconds
        Tokens of the answers, steps, and the time that they took.
    """

    answered: int = 0
    refused: int = 0
    bad: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0


class Job(ClosesOnExit):
    """Requests of a file, and the file of their answers, as long as it is open.

    Parameters
    ----------
    model
        What is asked.
    prompts
        A file of one JSON object per line: "prompt", a text or token ids, or "messages"; "id", which the answer repeats; and fields
        of `GenerationConfig` by name; or a line of OpenAI's batch format. It is read as it is needed.
    answers
        Where a line is appended for each. Lines that are answered there are left out: a job goes on where it was stopped.
    base
        The options of lines that have none of their own.
    chat
        Whether a "prompt" that is text is put into the chat template.
    bad_line
        Told of each line that is no request, which is left out; None: it ends the job when the lines before it are answered.

    Raises
    ------
    UsageError
        If options or files cannot be, two lines have one `custom_id`, or the answers are of another job.
    """

    def __init__(
        self, model: Model, prompts: str | Path, answers: str | Path, base: GenerationConfig, *, chat: bool = False,
        bad_line: Callable[[str], object] | None = None,
    ) -> None:  # fmt: skip
        resolve(base, model.architecture)
        self._prompts, self._bad_line = Path(prompts), bad_line
        self._key = json.dumps([model.name, chat, _given(base)], default=str).encode()
        self._requests = Requests(model, base, chat=chat, digest=self._digest)
        self._read_bytes = self._pending_bytes = 0
        self.tally = Tally()
        with ExitStack() as opening:
            file = opening.enter_context(opened(self._prompts))
            lines = lines_of(map(self._counted, file))
            if file.seekable():  # before anything runs; of a pipe, as its lines come
                deque(distinct(lines_of(file), self._prompts), maxlen=0)
                file.seek(0)
            else:
                lines = distinct(lines, self._prompts)
            if Path(answers).exists() and Path(answers).samefile(self._prompts):
                raise UsageError(f"'{answers}' has the requests: give another file for the answers.")
            self._answers = opening.enter_context(AnswersFile(Path(answers), self._requests.answered))
            self._size = self._prompts.stat().st_size
            self._left = unanswered(lines, self._answers.answered(), self._digest, (self._prompts, Path(answers)))
            self._first = next(self._left, None)
            self._open = opening.pop_all()

    @property
    def done(self) -> bool:
        """Whether every line has been answered before."""
        return self._first is None

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def run(
        self, model: CompiledModel, *, ordered: bool = True, most_live: int = MOST_LIVE, shown: bool = False
    ) -> Tally:
        """Answer the lines that are left, each line appended when its answer is there.

        Parameters
        ----------
        ordered
            Append answers in the order of the lines; otherwise as they end.
        most_live
            The most requests that are live at once.
        shown
            Whether to show the progress on stderr.

        Raises
        ------
        UsageError
            If a line is no request, and nobody is told of such lines; or if answers are of another job.
        OSError
            If the disk is full or fails.
        """
        asked, began, tally = dict[int, Asked](), perf_counter(), self.tally
        progress = Progress(model.memory, self._share)

        def after_step(stream: Stream) -> None:
            tally.tokens, tally.forwards, progress.answers = stream.tokens, stream.forwards, tally.answered
            if shown:
                progress(stream)

        with (
            interrupts_held(), model.exclusive(), Session(model) as session, interrupts_let_through(),
            progress if shown else nullcontext(),
        ):  # fmt: skip
            stream = Stream(session, most_live=most_live, after_step=after_step)
            for outcome in stream.run(self._entries(asked), ordered=ordered):
                one = asked.pop(outcome.number)
                answer = self._requests.answer(one, outcome)
                self._answers.write(answer)
                self._pending_bytes -= one.size_bytes
                tally.answered += 1
                tally.refused += (one.error or outcome.error) is not None
        tally.seconds = perf_counter() - began
        return tally

    def _entries(self, asked: dict[int, Asked]) -> Iterator[tuple[int, list[Submission]]]:
        """The submissions of each line that is left, which is noted in `asked`."""
        for line in chain([] if self._first is None else [self._first], self._left):
            try:
                one = self._requests.read(line)
            except UsageError as error:
                said = f"{self._prompts}, line {line.number:,}: {str(error).rstrip('.')}"
                self.tally.bad += 1
                if self._bad_line is None:
                    raise UsageError(
                        f"{said}. Mend it and start again, or skip such lines (--skip-bad-lines)."
                    ) from None
                self._bad_line(said)
                continue
            asked[line.number] = one
            self._pending_bytes += one.size_bytes
            yield line.number, one.submissions()

    def _digest(self, content: bytes) -> str:
        return blake2b(self._key + content, digest_size=6).hexdigest()

    def _counted(self, raw: bytes) -> bytes:
        self._read_bytes += len(raw)
        return raw

    def _share(self) -> float:
        """The part of the file that is answered; 0 if nobody knows how long it is."""
        return (self._read_bytes - self._pending_bytes) / self._size if self._size else 0.0


def _given(config: GenerationConfig) -> dict[str, Any]:
    """The options that are not left to their defaults."""
    values = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    return {name: value for name, value in values.items() if value != getattr(GenerationConfig(), name)}
