"""The small models' vocabulary: special tokens, all 256 bytes, and the words that the generators use.

A piece of text that is a word of the vocabulary is one token, anything else its UTF-8 bytes, one token each; so any
text encodes and comes back. `Vocabulary` needs neither torch nor `tokenizers`; a checkpoint's tokenizer.json
has the same rules. Words carry the space before them: " Anna" is one token, digits are always single.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

__all__ = [
    "ASSISTANT",
    "EOS",
    "MASK",
    "PAD",
    "PIECES",
    "SPECIAL",
    "USER",
    "WORDS",
    "Vocabulary",
    "vocabulary",
]

SPECIAL: Final = ("[PAD]", "[EOS]", "[MASK]", "<|user|>", "<|assistant|>")
PAD, EOS, MASK, USER, ASSISTANT = range(5)

PIECES: Final = " ?[A-Za-z]+|[^A-Za-z]"
"""A word with the space before it, or one character; the same regular expression in Python and in tokenizer.json."""


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FEMALE: Final = _list(
    "Anna Alice Amber Bella Beth Clara Cora Daisy Diana Edith Ella Emma Eva Fiona Flora Freya Gina Grace Hana Hazel "
    "Helen Holly Ida Irene Iris Ivy Jane Julia June Kate Kira Lara Laura Lena Lily Lucy Mara Maria Mia Nina Nora Olga "
    "Olive Paula Rosa Ruth Sara Tina"
)
MALE: Final = _list(
    "Adam Albert Alan Arthur Ben Boris Bruno Carl Colin Daniel David Dean Eric Ethan Felix Frank Fred George Hans "
    "Harry Henry Hugo Ivan Jack Jacob Jake James John Karl Kevin Leo Liam Louis Luke Mark Martin Max Milo Noah Oliver "
    "Oscar Otto Paul Peter Ralph Simon Tom Victor"
)
NAMES: Final = (*FEMALE, *MALE)

CODES: Final = ("code", "number", "pin", "locker", "ticket", "badge")
"""Attributes whose value is a number of four digits."""

KINDS: Final = {
    "color": _list("red blue green yellow purple orange white black pink brown gray silver"),
    "pet": _list("cat dog horse rabbit parrot turtle goat duck mouse pony lizard hamster"),
    "city": _list("Paris London Rome Berlin Madrid Vienna Oslo Prague Lisbon Athens Dublin Cairo"),
    "fruit": _list("apple pear plum cherry peach lemon mango grape melon banana fig kiwi"),
    "drink": _list("tea coffee milk juice water cocoa cider soda lemonade broth syrup punch"),
    "sport": _list("tennis soccer chess hockey golf rugby judo boxing rowing skating diving archery"),
}
"""Attributes whose value is a word."""

PLACES: Final = _list("park garden forest beach market river village school barn meadow hill library")
ITEMS: Final = _list("kite ball book drum lamp boat hat bell box flute map basket")
ADJECTIVES: Final = _list("old new small big shiny golden wooden soft red blue green yellow")
FEELINGS: Final = _list("happy sad proud tired calm brave curious glad")
PLAIN: Final = _list(
    "The the of is What and Write a story about in with to was had it he she He She his her him One day morning "
    "evening went walked found saw lost gave took kept hid under tree near there Then that night home friend "
    "named asked where thanked smiled laughed together carried back felt very played until sun set rain came all "
    "last looked everywhere could not find From on always shared Sort Answer an they wind strong cold long road "
    "birds sang children over bridge talked quietly At In Near Late too That one"
)


def _words() -> tuple[str, ...]:
    lists: list[Iterable[str]] = [
        PLAIN, NAMES, CODES, KINDS, *KINDS.values(), PLACES, ITEMS, ADJECTIVES, FEELINGS,
    ]  # fmt: skip
    return tuple(dict.fromkeys(" " + word for words in lists for word in words))


WORDS: Final = _words()
"""Every word with the space before it, in the order of their ids."""


_word_ids: Final = {word: len(SPECIAL) + 256 + index for index, word in enumerate(WORDS)}
_find_pieces: Final = re.compile(PIECES).findall
_split_specials: Final = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL) + ")").split


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and ids, both ways.

    Examples
    --------
    >>> table = vocabulary()
    >>> table.decode(table.encode(" The code of Anna is 4821."))
    ' The code of Anna is 4821.'
    >>> len(table.encode(" Anna")), len(table.encode(" 4821")), len(table.encode("é"))
    (1, 5, 2)
    """

    tokens: tuple[bytes, ...] = field(
        default=(*(text.encode() for text in SPECIAL), *(bytes([b]) for b in range(256)), *(w.encode() for w in WORDS))
    )

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Return token ids of a text; special tokens are recognised where they are written out."""
        ids: list[int] = []
        for part in _split_specials(text):
            if part in SPECIAL:
                ids.append(SPECIAL.index(part))
            else:
                for piece in _find_pieces(part):
                    word = _word_ids.get(piece)
                    if word is not None:
                        ids.append(word)
                    else:
                        ids.extend(len(SPECIAL) + byte for byte in piece.encode())
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of token ids; U+FFFD for those of the rows that fill the embedding up."""
        first = len(SPECIAL) if skip_special else 0
        parts = (self.tokens[i] if i < len(self.tokens) else b"\xff" for i in ids if i >= first)
        return b"".join(parts).decode("utf-8", errors="replace")

    def word(self, text: str) -> int:
        """Return the id of one word (with its space) or one byte."""
        (found,) = self.encode(text)
        return found


@cache
def vocabulary() -> Vocabulary:
    """Return the one vocabulary of the shipped models."""
    return Vocabulary()
