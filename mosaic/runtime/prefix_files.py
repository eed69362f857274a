"""A kept prefix as a safetensors file: its tokens, the keys and values of each layer, and of which model they are.

`tokens`, int64 [T]; `model`, uint8 [32], a digest; `layers.N`, in the dtype of keys, [2 * K * T, H]: keys, then values, of each
key-value head the T tokens. Where they lay in memory is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from mosaic.errors import CheckpointError, UsageError
from mosaic.kernels.shared.extents import Piece, kept_tokens
from mosaic.models.kept_keys import key_row
from mosaic.models.parts import KV
from mosaic.models.safetensors import wrong
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.runtime.checkpoint import SafetensorsFile, write_safetensors

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.prefixes import Prefix, Prefixes
    from mosaic.runtime.state_rows import OwnedRows

__all__ = ["SavedPrefixes"]

SAMPLED: Final = 64
"""First numbers of each weight that the digest of a model has."""
OTHER: Final = "give a prefix that this model has saved"


class _Layer(NamedTuple):
    """The keys and values of one layer: its tensor, and the tokens of each head in order, [n, H] each."""

    name: str
    shape: tuple[int, int]
    parts: list[Tensor]


class SavedPrefixes:
    """Prefixes that are kept for a caller, with their files; whoever calls it holds the engine's turn.

    Parameters
    ----------
    engine
        Of the model.
    prefixes
        Of a session.
    """

    def __init__(self, engine: Engine, prefixes: Prefixes) -> None:
        self._engine, self._prefixes = engine, prefixes
        self.unit = prefixes.unit

    def ready(self, tokens: Tensor) -> int:
        """Return how many first tokens, of int64 [T], have their keys."""
        return self._prefixes.units(tokens.numpy())

    def keep(self, tokens: Tensor) -> Prefix:
        """Take what is kept of tokens, int64 [T]."""
        return self._prefixes.open(tokens.numpy(), self.ready(tokens))

    def save(self, path: Path, tokens: Tensor, rows: OwnedRows) -> None:
        """Write the keys of tokens, int64 [T], which are the first of the owner's rows.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        layers = {layer.name: layer.parts for layer in _layers(self._engine, rows, 0, tokens.numel())}
        try:
            write_safetensors(path, {"tokens": tokens, "model": _model(self._engine), **layers})
        except OSError as error:
            raise UsageError(
                f"cannot write '{path}': {error.strerror}. Give a path in an existing, writable folder."
            ) from error

    def tokens_of(self, path: Path) -> Tensor:
        """Return the tokens of a file of this model, int64 [T].

        Raises
        ------
        CheckpointError
            If it is no such file, is cut short, or of another model.
        """
        file = SafetensorsFile(path)
        try:
            found = dict[str, Tensor]()
            for name, dtype in _HEAD.items():
                if name not in file.entries:
                    raise CheckpointError(f"{path}: no saved prefix: it has no tensor '{name}'; {OTHER}.")
                entry, wanted = file.entry(name), str(dtype).removeprefix("torch.")
                if entry.dtype != wanted or len(entry.shape) != 1 or not entry.shape[0]:
                    raise wrong(path, f"tensor '{name}'", f"{wanted} [n]", f"{entry.dtype} {list(entry.shape)}", OTHER)
                found[name] = torch.empty(entry.shape, dtype=dtype)
                file.read_into(name, found[name].view(torch.uint8))
        finally:
            file.close()
        if not torch.equal(found["model"], _model(self._engine)):
            raise CheckpointError(f"{path}: a prefix of another model: its config or its weights differ; {OTHER}.")
        return found["tokens"]

    def load(self, path: Path, tokens: Tensor, prefix: Prefix) -> None:
        """Read the keys of a file's tokens into rows that are reserved, but for those that are kept already.

        Raises
        ------
        CheckpointError
            If the file is cut short, or has other layers.
        DoesNotFit
            If the rows do not fit beside what other steps need.
        """
        arch, table = self._engine.planner.architecture, self._engine.table(KV)
        assert arch is not None
        self._engine.commit_rows(table, key_row(arch).columns * ITEMSIZE[KV.dtype_in(arch)])
        if prefix.length < tokens.numel():
            self._read(path, prefix.rows, prefix.length, tokens.numel())
        prefix.keep(tokens.numpy(), tokens.numel())

    def _read(self, path: Path, rows: OwnedRows, start: int, end: int) -> None:
        """Read the keys of the positions [start, end)."""
        file = SafetensorsFile(path)
        try:
            count = file.entry("tokens").shape[0]
            for layer in _layers(self._engine, rows, start, end):
                shape = layer.shape[0] // (end - start) * count, layer.shape[1]
                entry, dtype = file.entry(layer.name), str(layer.parts[0].dtype).removeprefix("torch.")
                if (entry.dtype, entry.shape) != (dtype, shape):
                    found = f"{entry.dtype} {list(entry.shape)}"
                    raise wrong(path, f"tensor '{layer.name}'", f"{dtype} {list(shape)}", found, OTHER)
                at = 0
                for part in layer.parts:
                    head, token = divmod(at, end - start)
                    there = torch.empty(part.shape, dtype=part.dtype) if part.is_cuda else part
                    first = (head * count + start + token) * part.shape[1] * part.element_size()
                    file.read_into(layer.name, there.view(-1).view(torch.uint8), first)
                    if there is not part:
                        part.copy_(there)
                    at += part.shape[0]
        finally:
            file.close()


_HEAD: Final = {"tokens": torch.int64, "model": torch.uint8}


def _layers(engine: Engine, rows: OwnedRows, start: int, end: int) -> Iterator[_Layer]:
    """The keys and values of the positions [start, end) in the owner's rows, which are memory."""
    arch, table = engine.plans.planner.architecture, engine.table(KV)
    assert arch is not None
    layout = key_row(arch)
    kv = engine.workspace.view(table.pool, 0, (table.rows, layout.columns), KV.dtype_in(arch))
    ends = [first for _, _, first, _ in rows.extents[1:]] + [rows.length]
    pieces = [
        Piece(max(first, start), min(stop, end), row, size, before + max(start - first, 0))
        for (row, size, first, before), stop in zip(rows.extents, ends, strict=True)
        if max(first, start) < min(stop, end)
    ]
    for number, layer in enumerate(arch.stack):
        heads, size = layer.attention.kv_heads, layer.attention.head_size
        kept = [kept_tokens(kv, piece, layout.places[number], heads, size) for piece in pieces]
        parts = [part[which, head] for which in range(2) for head in range(heads) for part in kept]
        yield _Layer(f"layers.{number}", (2 * heads * (end - start), size), parts)


def _model(engine: Engine) -> Tensor:
    """A digest of config.json, of the dtype of keys, and of the first numbers of each weight, uint8 [32]."""
    model, arch = engine.planner.model, engine.planner.architecture
    assert arch is not None
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True, default=str).encode())
    digest.update(f"{arch.dtype} {arch.keys}".encode())
    for name, view in sorted(engine.weights.views.items()):
        first = view.view(-1)[:SAMPLED].cpu().contiguous().view(torch.uint8)
        digest.update(name.encode() + first.numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
