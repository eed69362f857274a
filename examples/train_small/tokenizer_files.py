"""The small models' vocabulary as files of a checkpoint: tokenizer.json for the `tokenizers` package, and the chat template."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.quality.vocabulary import PIECES, SPECIAL, WORDS

__all__ = ["CHAT_TEMPLATE", "tokenizer_config", "tokenizer_json"]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '[EOS]' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Every turn begins with its role and a space; an answer therefore begins with a space, too."""


def tokenizer_json() -> str:
    """Return the vocabulary as a tokenizer.json: byte-level BPE without merges, whole words looked up first."""
    symbols = _byte_symbols()
    entries = [*SPECIAL, *symbols, *("".join(symbols[byte] for byte in word.encode()) for word in WORDS)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": text, **flags} for index, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text: index for index, text in enumerate(entries)},
            "merges": [],
        },
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def tokenizer_config() -> str:
    """Return the tokenizer_config.json beside it: special tokens and the chat template."""
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(document, indent=1) + "\n"


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
