"""Weights: safetensors files, memory-mapped and checked, copied or converted straight into the weights range.

No tensor is held twice: the pages of a file are dropped as soon as a tensor has been copied. Also: random weights for
presets, the constants that plans ask for, and the adoption of a module's own parameters.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from mosaic.errors import CheckpointError
from mosaic.runtime.workspace import DTYPES, Workspace, torch_dtype

__all__ = [
    "Checkpoint",
    "SafetensorsFile",
    "TensorEntry",
    "adopt_tensors",
    "fill_randomly",
    "load_weights",
    "members",
    "save_checkpoint",
    "weight_views",
]

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
_NAMES: Final = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_MOST_HEADER_BYTES: Final = 100_000_000
_STACK = re.compile(r"\{0:(\d+)\}")
_CONSTANT = re.compile(r"=inv_freq:theta=([0-9.eE+-]+),dim=(\d+)")
INIT_STD: Final = 0.02


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
    except ValueError as error:
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
    except (OSError, ValueError) as error:
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


# --- weights of a plan ------------------------------------------------------------------------------------------------


def members(tensor: str) -> list[str]:
    """List the checkpoint tensors that a buffer's `tensor` stands for: itself, or the members of a stack.

    >>> members("experts.{0:2}.up")
    ['experts.0.up', 'experts.1.up']
    """
    match = _STACK.search(tensor)
    if match is None:
        return [tensor]
    return [tensor[: match.start()] + str(i) + tensor[match.end() :] for i in range(int(match[1]))]


def _stored(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Give the buffers that hold weights of their own."""
    for record in document["buffers"]:
        if record["kind"] in ("weight", "host") and record["alias_of"] is None and record["tensor"] is not None:
            yield record


def weight_views(document: Mapping[str, Any], workspace: Workspace) -> dict[str, Tensor]:
    """View every weight of a plan in its range, by its `tensor` field; constants (`=...`) too."""
    return {
        record["tensor"]: workspace.view(record["pool"], record["offset"], record["shape"], record["dtype"])
        for record in _stored(document)
    }


def load_weights(views: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Fill the views from a checkpoint, and compute the constants.

    Raises
    ------
    CheckpointError
        If a tensor is missing, or of another shape, or not convertible.
    """
    for tensor, view in views.items():
        if tensor.startswith("="):
            _fill_constant(tensor, view)
        elif _STACK.search(tensor) is None:
            checkpoint.copy_into(tensor, view)
        else:
            for part, name in zip(_parts(tensor, view), members(tensor), strict=True):
                checkpoint.copy_into(name, part)


def fill_randomly(views: Mapping[str, Tensor], *, seed: int = 0) -> None:
    """Fill the views with random weights: normal with deviation 0.02, around 1 for norms (vectors that are no bias).

    Every tensor has a generator of its own, seeded by its name, so that its values depend on nothing else in the model.
    """
    for tensor, view in views.items():
        if tensor.startswith("="):
            _fill_constant(tensor, view)
            continue
        for part, name in zip(_parts(tensor, view), members(tensor), strict=True):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            mean = 1.0 if part.dim() == 1 and not name.endswith("bias") else 0.0
            part.normal_(mean, INIT_STD, generator=generator)


def _parts(tensor: str, view: Tensor) -> list[Tensor]:
    return [view] if _STACK.search(tensor) is None else list(view.unbind(0))


def _fill_constant(tensor: str, out: Tensor) -> None:
    match = _CONSTANT.fullmatch(tensor)
    if match is None or out.shape != (int(match[2]) // 2,):
        raise CheckpointError(
            f"the plan's constant '{tensor}' {list(out.shape)} is unknown; plan again with this version."
        )
    theta, dim = float(match[1]), int(match[2])
    # in float32, operation for operation as the reference models compute it
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    out.copy_(1.0 / (theta**exponent))


def adopt_tensors(document: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take a module's own parameters for the weights of a plan, without a copy.

    Parameters
    ----------
    state
        `module.state_dict()`, or any mapping of the plan's tensor names to tensors. A stack is looked up under its
        template, and as one tensor only: members that lie apart cannot be adopted.

    Returns
    -------
    dict
        Plan tensor name -> the caller's tensor, for `Executor(tensors=...)`; constants are not among them.

    Raises
    ------
    CheckpointError
        If a parameter is missing, of another shape or dtype, not contiguous, or not on the CPU.
    """
    found: dict[str, Tensor] = {}
    for record in document["buffers"]:
        name = record["tensor"]
        if record["kind"] not in ("weight", "external") or name is None or name.startswith("="):
            continue
        if name not in state:
            detail = "members of a stack lie apart" if _STACK.search(name) else f"{len(state)} others"
            raise CheckpointError(
                f"the module: parameter '{name}': expected {record['dtype']} {record['shape']}, found {detail}; "
                f"save the model and compile the checkpoint directory instead."
            )
        found[name] = _adopt(name, record, state[name])
    return found


def _adopt(name: str, record: Mapping[str, Any], tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    actual = str(tensor.dtype).removeprefix("torch.")
    fits = list(tensor.shape) == list(record["shape"]) and actual == record["dtype"]
    if not fits or not tensor.is_contiguous() or tensor.device.type != "cpu":
        kind = f"{'' if tensor.is_contiguous() else 'non-contiguous '}{actual} {list(tensor.shape)} on {tensor.device}"
        raise CheckpointError(
            f"the module: parameter '{name}': expected {record['dtype']} {record['shape']} on cpu, found {kind}; "
            f"convert the module first, for example with .to(torch.{record['dtype']})."
        )
    return tensor


# --- saving -----------------------------------------------------------------------------------------------------------


def save_checkpoint(directory: str | os.PathLike[str], views: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write `model.safetensors` and `config.json`: stacks as members, no constants; copies nothing in memory.

    The checkpoint appears whole: it is written under another name first.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: part
        for tensor, view in views.items()
        if not tensor.startswith("=")
        for part, name in zip(_parts(tensor, view), members(tensor), strict=True)
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        kind = _NAMES[next(known for known, dtype in DTYPES.items() if dtype == tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = folder / f".model.safetensors.{os.getpid()}"
    try:
        with open(temporary, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        os.replace(temporary, folder / "model.safetensors")
    finally:
        temporary.unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
