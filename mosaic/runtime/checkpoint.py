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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from mosaic.errors import CheckpointError
from mosaic.runtime.workspace import DTYPES, torch_dtype

__all__ = ["Checkpoint", "SafetensorsFile", "TensorEntry", "write_safetensors"]

SAFETENSORS_DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_MOST_HEADER_BYTES: Final = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies in a file: dtype by its PyTorch name, shape, bytes [start, end) of the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _wrong(file: Path, what: str, expected: object, found: object, step: str) -> CheckpointError:
    return CheckpointError(f"{file}: {what}: expected {expected}, found {found}; {step}.")


_AGAIN: Final = "download the file again"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name '{next(n for n in names if names.count(n) > 1)}' twice")
    return found


class SafetensorsFile:
    """One safetensors file, memory-mapped, its header checked in full before any tensor is touched.

    Raises
    ------
    CheckpointError
        If the file is missing, truncated, or its header is not what the format allows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                self.entries, self._data_start = _read_header(self.path, stream.read(8), stream.read, size)
                # a private writable mapping: PyTorch warns about read-only memory; nothing here writes to it
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise _wrong(self.path, "the file", "a readable file", error.strerror, "check the path") from None

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
        if name not in self.entries:
            found = f"{len(self.entries)} others"
            raise _wrong(self.path, f"tensor '{name}'", "a tensor", found, "the index and this file do not match")
        return self.entries[name]

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


def _read_header(path: Path, prefix: bytes, read: Any, size: int) -> tuple[dict[str, TensorEntry], int]:
    if len(prefix) < 8:
        raise _wrong(path, "the file", "at least 8 bytes", f"{size} bytes", _AGAIN)
    length = int.from_bytes(prefix, "little")
    if length > _MOST_HEADER_BYTES:
        raise _wrong(path, "the header", f"at most {_MOST_HEADER_BYTES:,} bytes", f"a length of {length:,}", _AGAIN)
    text = read(length)
    if len(text) < length:
        raise _wrong(path, "the header", f"{length:,} bytes", f"{len(text):,} bytes before the file ends", _AGAIN)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "the header", "JSON with unique names", f"{error}", _AGAIN) from None
    if not isinstance(header, dict):
        raise _wrong(path, "the header", "a JSON object", type(header).__name__, _AGAIN)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _wrong(path, "__metadata__", "a JSON object", type(metadata).__name__, _AGAIN)
    entries = {name: _read_entry(path, name, entry) for name, entry in header.items()}
    _check_layout(path, entries, size - 8 - length)
    return entries, 8 + length


def _read_entry(path: Path, name: str, entry: object) -> TensorEntry:
    what = f"tensor '{name}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise _wrong(path, what, "dtype, shape and data_offsets", found, _AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        known = ", ".join(SAFETENSORS_DTYPES)
        raise _wrong(path, what, f"a dtype of {known}", repr(dtype), "convert the checkpoint to bfloat16 first")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _wrong(path, what, "a shape and two offsets of integers >= 0", f"{shape} and {offsets}", _AGAIN)
    needed = math.prod(shape) * torch_dtype(SAFETENSORS_DTYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != needed:
        raise _wrong(path, what, f"{needed:,} bytes for {dtype} {shape}", f"the offsets {offsets}", _AGAIN)
    return TensorEntry(dtype=SAFETENSORS_DTYPES[dtype], shape=tuple(shape), start=offsets[0], end=offsets[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """Tensors must tile the data section: no holes, no overlaps, nothing missing at the end."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise _wrong(path, f"tensor '{name}'", f"a start at byte {position:,}", f"{entry.start:,}", _AGAIN)
        position = entry.end
        if position > data_bytes:
            what = f"tensor '{name}'"
            raise _wrong(path, what, f"data up to byte {position:,}", f"{data_bytes:,} bytes of data", _AGAIN)
    if position != data_bytes:
        raise _wrong(path, "the data section", f"{position:,} bytes", f"{data_bytes:,} bytes", _AGAIN)


class Checkpoint:
    """A checkpoint directory: `model.safetensors`, or shards listed in `model.safetensors.index.json`.

    Examples
    --------
    >>> Checkpoint("does-not-exist")
    Traceback (most recent call last):
    mosaic.errors.CheckpointError: does-not-exist: ...
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory)
        self._files: dict[str, SafetensorsFile] = {}
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if index.is_file():
            self.where = _read_index(index)
            for name in sorted(set(self.where.values())):
                if not (self.path / name).is_file():
                    missing = sum(file == name for file in self.where.values())
                    raise _wrong(
                        index, f"shard '{name}'", f"a file with {missing} tensors", "no file", "download that shard"
                    )
                self._files[name] = SafetensorsFile(self.path / name)
            for tensor, name in self.where.items():
                self._files[name].entry(tensor)
        elif single.is_file():
            self._files[single.name] = SafetensorsFile(single)
            self.where = dict.fromkeys(self._files[single.name].entries, single.name)
        else:
            raise _wrong(
                self.path,
                "the checkpoint",
                f"{single.name} or {index.name}",
                "neither",
                "point to a checkpoint directory",
            )

    def __contains__(self, name: str) -> bool:
        return name in self.where

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.where)

    def copy_into(self, name: str, out: Tensor) -> None:
        """Copy a tensor into a view, converting between floating-point dtypes; then drop its pages."""
        if name not in self.where:
            close = f"{len(self.where)} others"
            raise _wrong(self.path, f"tensor '{name}'", f"shape {list(out.shape)}", close, "the model needs it")
        file = self._files[self.where[name]]
        entry, wanted = file.entry(name), str(out.dtype).removeprefix("torch.")
        if entry.shape != tuple(out.shape):
            raise _wrong(
                file.path,
                f"tensor '{name}'",
                f"shape {list(out.shape)}",
                list(entry.shape),
                "check config.json against it",
            )
        if entry.dtype != wanted and not (torch_dtype(entry.dtype).is_floating_point and out.is_floating_point()):
            raise _wrong(file.path, f"tensor '{name}'", wanted, entry.dtype, "convert the checkpoint first")
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


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, "the index", "JSON with unique names", error, "download it again") from None
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise _wrong(path, "weight_map", "a mapping of tensor to file", type(where).__name__, "download it again")
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise _wrong(
                path, f"tensor '{name}'", "the name of a file beside the index", repr(file), "download it again"
            )
    return where


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
