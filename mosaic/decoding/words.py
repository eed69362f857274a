"""Words as tokens, for a model of random weights that has no tokenizer: its requests are timed, not read. Torch-free."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mosaic.decoding.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

__all__ = ["WordTokenizer"]


class WordTokenizer(Tokenizer):
    """One token for each word of a text, and one word for each token.

    Parameters
    ----------
    architecture
        Of the model. A word gets an id below its vocabulary by a hash, the same in all processes; never that of the mask or of
        a token that ends answers.

    Examples
    --------
    >>> from mosaic.models import load
    >>> tokenizer = WordTokenizer(load("sdar-8b").architecture)
    >>> [*map(len, map(tokenizer.encode, ("", "to be", "to be  or\\nnot")))], tokenizer.decode([7, 151669])
    ([0, 2, 4], '7 151669 ')
    """

    longest_token = 32

    def __init__(self, architecture: Architecture) -> None:
        kept = {architecture.mask_token_id, *architecture.eos_token_ids}
        self._ids = [token for token in range(architecture.vocabulary) if token not in kept]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return an id for each word; nothing is put around them."""
        ids, count = self._ids, len(self._ids)
        return [ids[zlib.crc32(word) % count] for word in text.encode("utf-8", "surrogatepass").split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the ids in decimals; special ones, too."""
        return "".join(f"{token} " for token in token_ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return what was said, without who said it."""
        return "\n".join(message["content"] for message in messages)

    def info(self) -> dict[str, Any]:
        """Return nothing: there is no tokenizer_config.json."""
        return {}
