"""The tokenizer of a checkpoint that comes as vocab.json and merges.txt, as Dream's does: Qwen2's byte-level pairs.

Text in NFC is cut into words, numbers digit by digit, and runs of signs or space; bytes of each are merged by rank. Added
tokens, with their ids, are those of tokenizer_config.json. Source: transformers' Qwen2 tokenizer, which Dream's own is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mosaic.errors import CheckpointError

__all__ = ["CLASSES", "FILES", "build"]

FILES: Final = ("vocab.json", "merges.txt")
CLASSES: Final = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Tokenizer classes that cut text alike."""
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English endings
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # letters, with one sign or space before them
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # signs, and the ends of lines after them
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(directory: Path, config: Mapping[str, Any]) -> Any:
    """Build the `tokenizers.Tokenizer` of a directory that has both files.

    Parameters
    ----------
    config
        Of tokenizer_config.json: the class, and added tokens by id.

    Raises
    ------
    CheckpointError
        Another class, files that cannot be read, or added tokens whose ids are not the next ones.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = config.get("tokenizer_class")
    if kind not in CLASSES:
        raise CheckpointError(
            f"{directory}: vocab.json and merges.txt of the class {kind!r}, known are {', '.join(CLASSES)}; make a "
            "tokenizer.json of them with the library that they come from."
        )
    try:
        made = Tokenizer(models.BPE.from_file(*(str(directory / name) for name in FILES)))
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(
            f"{directory}: cannot read vocab.json and merges.txt: {error}; download them again."
        ) from None
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    for token_id, entry in sorted(_added(directory, config).items()):
        _add(directory, made, token_id, entry)
    return made


def _added(directory: Path, config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The added tokens by id."""
    given = config.get("added_tokens_decoder") or {}
    try:
        return {int(token_id): {"content": str(entry["content"]), **entry} for token_id, entry in given.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{directory}/tokenizer_config.json: 'added_tokens_decoder' must map ids to tokens; download it again."
        ) from None


def _add(directory: Path, made: Any, token_id: int, entry: Mapping[str, Any]) -> None:
    """Add one token, whose id has to be the next or its own in the vocabulary."""
    from tokenizers import AddedToken

    options = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    token = AddedToken(entry["content"], **options)
    (made.add_special_tokens if options["special"] else made.add_tokens)([token])
    found = made.token_to_id(entry["content"])
    if found != token_id:
        raise CheckpointError(
            f"{directory}/tokenizer_config.json: the added token {entry['content']!r} has the id {token_id}, with "
            f"vocab.json it gets {found}; download both files of the same model."
        )
