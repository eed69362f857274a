"""Checkpoint files: safetensors, every claim of their headers checked before a tensor is touched.

Tensors are read straight to their place in host memory, or through a small buffer to a device or another dtype. No
tensor is held twice. Files are read, not mapped: a file that another process cuts short is an error, not a bus error.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mosaic.models.safetensors import (
    AGAIN,
    SAFETENSORS_DTYPES,
    Layout,
    TensorEntry,
    find_entry,
    read_header,
    tensor_rows,
    wrong,
)
from mosaic.runtime.range_pool import ClosesOnExit
from mosaic.runtime.workspace import DTYPES, torch_dtype
from mosaic.units import MIB

__all__ = ["PIECE_BYTES", "Checkpoint", "SafetensorsFile", "TensorEntry", "write_safetensors"]

PIECE_BYTES: Final = 32 * MIB
"""Largest piece, in bytes, in which tensors are read, converted, written and drawn at random."""


class SafetensorsFile:
    """One safetensors file, open for reading, its header checked in full before any tensor is touched.

    Raises
    ------
    CheckpointError
        If the file is missing, truncated, or its header is not what the format allows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.entries, self._data_start = read_header(self.path)
        self._stream = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed by `close`)

    def entry(self, name: str) -> TensorEntry:
        """Look a tensor up."""
        return find_entry(self.path, self.entries, name)

    def read_into(self, name: str, out: Tensor, start: int = 0) -> None:
        """Read a tensor's bytes from byte `start` on, as many as fill `out`.

        Parameters
        ----------
        out
            uint8 [N] on the CPU, contiguous.

        Raises
        ------
        CheckpointError
            If the file ends before them, or cannot be read.
        """
        entry, buffer, done = self.entry(name), out.numpy().data, 0
        position = self._data_start + entry.start + start
        while done < len(buffer):
            try:
                count = os.preadv(self._stream.fileno(), [buffer[done : done + PIECE_BYTES]], position + done)
            except OSError as error:
                raise wrong(self.path, f"tensor '{name}'", "readable bytes", error.strerror, AGAIN) from error
            if count == 0:
                expected = f"{entry.end - entry.start:,} bytes"
                raise wrong(self.path, f"tensor '{name}'", expected, f"the file's end after {start + done:,}", AGAIN)
            done += count

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._stream.close()


class Checkpoint(ClosesOnExit):
    """A checkpoint directory: `model.safetensors`, or shards listed in `model.safetensors.index.json`.

    While open it holds two buffers of `PIECE_BYTES`: one for bytes on their way to a device, one for bytes being
    converted.

    Examples
    --------
    >>> Checkpoint("does-not-exist")
    Traceback (most recent call last):
    mosaic.errors.CheckpointError: does-not-exist: ...
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.layout = Layout(directory)
        self.path = self.layout.path
        self._files: dict[str, SafetensorsFile] = {}
        self._raw, self._converted = _anonymous(PIECE_BYTES), _anonymous(PIECE_BYTES)
        try:
            for name in self.layout.files:
                self._files[name] = SafetensorsFile(self.path / name)
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return tensor_rows(name)[0] in self.layout.where

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.layout.where)

    def copy_into(self, name: str, out: Tensor) -> None:
        """Copy a tensor, or rows of one, into a contiguous view on any device, converting floating-point dtypes.

        Raises
        ------
        CheckpointError
            If the tensor is missing, has another shape or dtype, or the file ends before it.
        """
        path, entry = self.layout.find(name, tuple(out.shape))
        file, wanted = self._files[path.name], str(out.dtype).removeprefix("torch.")
        name = tensor_rows(name)[0]
        start = entry.start - file.entry(name).start
        if entry.dtype != wanted and not (torch_dtype(entry.dtype).is_floating_point and out.is_floating_point()):
            raise wrong(file.path, f"tensor '{name}'", wanted, entry.dtype, "convert the checkpoint first")
        flat = out.view(-1)
        if entry.dtype == wanted and out.device.type == "cpu":
            file.read_into(name, flat.view(torch.uint8), start)
        else:
            self._copy_by_pieces(file, name, torch_dtype(entry.dtype), flat, start)

    def _copy_by_pieces(
        self, file: SafetensorsFile, name: str, dtype: torch.dtype, out: Tensor, first_byte: int
    ) -> None:
        """Read, convert and copy what fits the buffers at once; PyTorch would convert in a copy of its own."""
        size = PIECE_BYTES // max(dtype.itemsize, out.element_size())
        for start in range(0, out.numel(), size):
            piece = out[start : start + size]
            raw = self._raw[: piece.numel() * dtype.itemsize]
            file.read_into(name, raw, first_byte + start * dtype.itemsize)
            found = raw.view(dtype)
            if dtype != out.dtype and out.device.type != "cpu":
                found = self._converted[: piece.numel() * out.element_size()].view(out.dtype).copy_(found)
            piece.copy_(found)

    def equal(self, name: str, other: str) -> bool:
        """Tell whether two tensors have the same dtype, shape and bits."""
        places = [(self._files[self.layout.where[tensor]], tensor) for tensor in (name, other)]
        entries = [file.entry(tensor) for file, tensor in places]
        if (entries[0].dtype, entries[0].shape) != (entries[1].dtype, entries[1].shape):
            return False
        size = entries[0].end - entries[0].start
        for start in range(0, size, PIECE_BYTES):
            pieces = [buffer[: min(PIECE_BYTES, size - start)] for buffer in (self._raw, self._converted)]
            for (file, tensor), piece in zip(places, pieces, strict=True):
                file.read_into(tensor, piece, start)
            if not torch.equal(*pieces):
                return False
        return True

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _anonymous(size: int) -> Tensor:
    """Make a uint8 buffer whose pages are committed on first touch and given back with its last view."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
    """Write tensors to a file straight from their memory; the file is renamed into place when it is complete.

    Parameters
    ----------
    tensors
        Contiguous tensors by name, written in this order; tensors of a device are copied in pieces. A sequence of
        tensors is written as one: their rows one after another.
    """
    target = Path(path)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kinds = {DTYPES[dtype]: kind for kind, dtype in SAFETENSORS_DTYPES.items()}
    position = 0
    parts = {name: [given] if isinstance(given, Tensor) else list(given) for name, given in tensors.items()}
    for name, (tensor, *more) in parts.items():
        end = position + sum(part.numel() * part.element_size() for part in (tensor, *more))
        shape = [sum(part.shape[0] for part in (tensor, *more)), *tensor.shape[1:]] if more else list(tensor.shape)
        header[name] = {"dtype": kinds[tensor.dtype], "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for part in chain.from_iterable(parts.values()):
                flat = part.view(-1).view(torch.uint8)
                for start in range(0, flat.numel(), PIECE_BYTES):
                    stream.write(flat[start : start + PIECE_BYTES].cpu().numpy().data)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
