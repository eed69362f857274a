"""Prefixes that a session keeps until they are released."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mosaic.decoding.prompts import Prompt, token_ids
from mosaic.errors import DoesNotFit, UsageError
from mosaic.runtime.interrupts import interrupts_held, interrupts_let_through
from mosaic.runtime.range_pool import ClosesOnExit

if TYPE_CHECKING:
    from mosaic.decoding.described import Described
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.runtime.prefix_files import SavedPrefixes
    from mosaic.runtime.prefixes import Prefix
    from mosaic.runtime.request_table import RequestTable
    from mosaic.runtime.steps import StepRunner

__all__ = ["PinnedPrefix", "Pins"]


class PinnedPrefix(ClosesOnExit):
    """First tokens of prompts whose keys stay until they are released, or the session is closed.

    Attributes
    ----------
    token_ids
        int64 [T], whole units; empty once it is released.
    """

    def __init__(self, pins: Pins, prefix: Prefix, token_ids: Tensor) -> None:
        self._pins, self._prefix, self.token_ids = pins, prefix, token_ids

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokens and keys to a safetensors file, which a session of the same model loads (`Pins.load`).

        Raises
        ------
        UsageError
            If it is released, or the file cannot be written.
        """
        if not self.token_ids.numel():
            raise UsageError("the prefix is released: pin it again.")
        self._pins.save(Path(path), self.token_ids, self._prefix)

    def close(self) -> None:
        """Release it: its keys stay as those of requests that have ended. Closing twice is fine."""
        self._pins.release(self, self._prefix)
        self.token_ids = self.token_ids[:0]


class Pins:
    """The pinned prefixes of a session.

    Parameters
    ----------
    runner, table
        The model, and the session's table.
    has_room
        Whether all steps fit beside the rows that are taken, and these requests.
    compute
        Lets a request with this prompt come and end.
    tokenizer
        Of the model.

    Examples
    --------
    >>> import mosaic, torch
    >>> with mosaic.compile("small-sdar") as model, model.session() as session:
    ...     with session.prefixes.pin(torch.arange(10, 110)) as pinned:
    ...         request = session.submit(torch.arange(10, 120), gen_length=4)
    ...         while session.live:
    ...             _ = session.advance()
    ...     len(pinned.token_ids), request.generation.cached_tokens
    (0, 64)
    """

    def __init__(
        self, runner: StepRunner, table: RequestTable | None,
        has_room: Callable[[Sequence[Described]], bool], compute: Callable[[Tensor], object], tokenizer: Callable[[], Tokenizer],
    ) -> None:  # fmt: skip
        self._runner, self._table, self._has_room = runner, table, has_room
        self._compute, self._tokenizer = compute, tokenizer
        self._held: dict[PinnedPrefix, None] = {}
        self._closed = False

    @property
    def _saved(self) -> SavedPrefixes:
        if self._closed:
            raise UsageError("the session is closed: open another one.")
        found = None if self._table is None else self._table.saved_prefixes
        if found is None:
            raise UsageError(
                "prefixes are kept of models that attend by blocks, unless their caller has the weights: leave them out here."
            )
        return found

    def pin(self, prompt: Prompt) -> PinnedPrefix:
        """Keep the keys of a prompt's whole units until they are released, or the session is closed; compute what is missing.

        Steps that this takes serve live requests too: the next call of `advance` returns what they did.

        Raises
        ------
        UsageError
            If the model shares no prefixes, the prompt cannot be or has no unit, or a callback calls it.
        DoesNotFit
            If steps do not fit beside it.
        """
        with interrupts_held(), self._runner.exclusive():
            tokens, unit = token_ids(prompt, self._tokenizer, which="the prompt"), self._saved.unit
            if tokens.numel() < unit:
                raise UsageError(f"a prompt of {tokens.numel():,} tokens: pin {unit:,} at least.")
            whole = tokens[: tokens.numel() // unit * unit].to("cpu", torch.int64)
            if self._saved.ready(whole) < whole.numel():
                with interrupts_let_through():
                    self._compute(whole)
            return self._pinned(self._saved.keep(whole), whole)

    def load(self, path: str | os.PathLike[str]) -> PinnedPrefix:
        """Keep the keys of a file that `PinnedPrefix.save` has written, as `pin` does.

        Raises
        ------
        CheckpointError
            If the file cannot be read, is cut short, or of another model.
        DoesNotFit
            If steps do not fit beside it.
        """
        with interrupts_held(), self._runner.exclusive():
            tokens = self._saved.tokens_of(Path(path))
            prefix = self._saved.keep(tokens)
            try:
                prefix.rows.reserve(tokens.numel())
                self._require(tokens)
                self._saved.load(Path(path), tokens, prefix)
            except BaseException:
                prefix.close()
                raise
            return self._pinned(prefix, tokens)

    def _require(self, tokens: Tensor) -> None:
        if not self._has_room(()):
            count = tokens.numel()
            raise DoesNotFit(
                f"steps do not fit beside a pinned prefix of {count:,} tokens: release others, or pin less."
            )

    def _pinned(self, prefix: Prefix, tokens: Tensor) -> PinnedPrefix:
        try:
            self._require(tokens)
        except BaseException:
            prefix.close()
            raise
        found = PinnedPrefix(self, prefix, tokens[: prefix.rows.length].clone())
        self._held[found] = None
        return found

    def save(self, path: Path, tokens: Tensor, prefix: Prefix) -> None:
        """Write a pinned prefix; as `PinnedPrefix.save`."""
        with self._runner.exclusive():
            self._saved.save(path, tokens, prefix.rows)

    def release(self, pinned: PinnedPrefix, prefix: Prefix) -> None:
        """Give back what a pinned prefix has."""
        with interrupts_held(), self._runner.exclusive():
            prefix.close()
            self._held.pop(pinned, None)

    def close(self) -> None:
        """Release all, and keep no more: nobody would release it."""
        self._closed = True
        for pinned in [*self._held]:
            pinned.close()
