"""A checkpoint's own tokenizer: tokenizer.json, or vocab.json and merges.txt; and its chat template. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mosaic.decoding.byte_pairs import FILES, build
from mosaic.errors import CheckpointError, MissingExtra, UsageError

__all__ = ["Tokenizer", "has_tokenizer"]


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has the files of a tokenizer."""
    return any(all((directory / name).is_file() for name in names) for names in (("tokenizer.json",), FILES))


class Tokenizer:
    """Reads the tokenizer of a checkpoint directory.

    Parameters
    ----------
    directory
        With a tokenizer.json, or with vocab.json, merges.txt and tokenizer_config.json as Dream's; tokenizer_config.json and
        chat_template.jinja are read where they are.
    mask
        The mask token's id: text that spells it is encoded as any other text, since a prompt cannot have the token itself.

    Raises
    ------
    CheckpointError
        If there are no such files, or they cannot be read.
    MissingExtra
        If the package tokenizers is not installed.
    """

    def __init__(self, directory: str | Path, *, mask: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise MissingExtra("tokenizers", "torch", "text in and out of a model") from None
        self.directory = Path(directory)
        self._config = _read_json(self.directory / "tokenizer_config.json")
        if not has_tokenizer(self.directory):
            raise CheckpointError(
                f"{self.directory} has neither tokenizer.json nor {' and '.join(FILES)}: download them with the checkpoint."
            )
        file = self.directory / "tokenizer.json"
        if file.is_file():
            try:
                self._backend = Backend.from_file(str(file))
            except Exception as error:  # the Rust side raises bare Exception
                raise CheckpointError(f"cannot read {file}: {error}; download it again.") from None
        else:
            self._backend = build(self.directory, self._config)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._mask, self._spelled = mask, list[int]()
        if mask is not None and (name := self._backend.id_to_token(mask)) is not None:
            self._backend.encode_special_tokens = True
            self._spelled = list(self._backend.encode(name, add_special_tokens=False).ids)
            self._backend.encode_special_tokens = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of a text, with what the tokenizer puts around it (such as a begin token) if asked for."""
        try:
            found = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # how the Rust side refuses lone surrogates
            raise UsageError(
                "the text has surrogates, which are no characters: decode it with errors='replace'."
            ) from None
        if self._mask not in found:
            return found
        return [token for one in found for token in (self._spelled if one == self._mask else [one])]

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a token."""
        return max(map(len, self._backend.get_vocab()))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; incomplete characters become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return token ids of a conversation in the checkpoint's chat template, up to where the assistant's answer begins.

        Parameters
        ----------
        messages
            Mappings with `role` ("system", "user", "assistant") and `content`.

        Raises
        ------
        UsageError
            If the checkpoint has no chat template, or the template refuses the conversation.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the conversation as the template writes it, before tokenization."""
        template = self._chat_template()
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise MissingExtra("jinja2", "torch", "a chat template") from None

        def refuse(reason: str) -> None:
            raise jinja2.TemplateError(reason)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(template).render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens()
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template of {self.directory} refuses this: {error}.") from None

    def info(self) -> dict[str, Any]:
        """Return what tokenizer_config.json says, special tokens as texts, and the chat template if there is one."""
        found = self._config | {name: text or None for name, text in self._special_tokens().items()}
        try:
            return found | {"chat_template": self._chat_template()}
        except UsageError:
            return found

    def _chat_template(self) -> str:
        file = self.directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = self._config.get("chat_template")
        if isinstance(found, list):  # several, by name
            found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
        if not isinstance(found, str):
            raise UsageError(f"{self.directory} has no chat template: give the prompt as plain text, without --chat.")
        return found

    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            found[name] = text if isinstance(text, str) else ""
        return found


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; download it again.") from None
    return found if isinstance(found, dict) else {}
