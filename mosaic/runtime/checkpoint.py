"""Checkpoint files: safetensors, memory-mapped, every claim of their headers checked before a tensor is touched.

A file's pages are dropped as soon as a tensor has been copied, so that no tensor is held twice.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from mosaic.models.safetensors import SAFETENSORS_DTYPES, Layout, TensorEntry, find_entry, read_header, wrong
from mosaic.runtime.workspace import DTYPES, torch_dtype

__all__ = ["Checkpoint", "SafetensorsFile", "TensorEntry", "write_safetensors"]


class SafetensorsFile:
    """One safetensors file, memory-mapped, its header checked in full before any tensor is touched.

    Raises
    ------
    CheckpointError
        If the file is missing, truncated, or its header is not what the format allows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.entries, self._data_start = read_header(self.path)
        with open(self.path, "rb") as stream:
            # a private writable mapping: PyTorch warns about read-only memory; nothing here writes to it
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> Tensor:
        """View a tensor of the file in the mapping; valid until `close`."""
        entry = self.entry(name)
        dtype, offset = torch_dtype(entry.dtype), self._data_start + entry.start
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(entry.shape)

    def entry(self, name: str) -> TensorEntry:
        """Look a tensor up."""
        return find_entry(self.path, self.entries, name)

    def drop_pages(self, name: str) -> None:
        """Tell the system that a tensor's pages will not be read again."""
        entry = self.entry(name)
        start = (self._data_start + entry.start) // mmap.PAGESIZE * mmap.PAGESIZE
        length = self._data_start + entry.end - start
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Let go of the mapping; the system unmaps it when no view is left."""
        with suppress(BufferError):  # a view is still alive: its owner keeps the mapping
            self._map.close()


class Checkpoint:
    """A checkpoint directory: `model.safetensors`, or shards listed in `model.safetensors.index.json`.

    Examples
    --------
    >>> Checkpoint("does-not-exist")
    Traceback (most recent call last):
    mosaic.errors.CheckpointError: does-not-exist: ...
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.layout = Layout(directory)
        self.path = self.layout.path
        self._files = {name: SafetensorsFile(self.path / name) for name in self.layout.files}

    def __contains__(self, name: str) -> bool:
        return name in self.layout.where

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.layout.where)

    def copy_into(self, name: str, out: Tensor) -> None:
        """Copy a tensor into a view, converting between floating-point dtypes; then drop its pages."""
        path, entry = self.layout.find(name, tuple(out.shape))
        file, wanted = self._files[path.name], str(out.dtype).removeprefix("torch.")
        if entry.dtype != wanted and not (torch_dtype(entry.dtype).is_floating_point and out.is_floating_point()):
            raise wrong(file.path, f"tensor '{name}'", wanted, entry.dtype, "convert the checkpoint first")
        out.copy_(file.tensor(name))
        file.drop_pages(name)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file, straight from their memory; it appears whole, written under another name first.

    Parameters
    ----------
    tensors
        Contiguous CPU tensors by name, written in this order.
    """
    target = Path(path)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kinds = {DTYPES[dtype]: kind for kind, dtype in SAFETENSORS_DTYPES.items()}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
