"""Checkpoint files without torch: the headers of safetensors, fully checked; tensor data is not read.

So `mosaic plan` refuses a checkpoint that cannot be loaded, and loading can trust the offsets.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mosaic.errors import CheckpointError
from mosaic.registrar.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_STACK: Final = re.compile(r"\{0:(\d+)\}")
_ROWS: Final = re.compile(r"(.+)\[(\d+):(\d+)\]")
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
    """A tensor's place in a file: dtype by its PyTorch name, shape, bytes [start, end) of the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def wrong(file: Path, what: str, expected: object, found: object, step: str) -> CheckpointError:
    return CheckpointError(f"{file}: {what}: expected {expected}, found {found}; {step}.")


AGAIN: Final = "download the file again"
CONFIG: Final = "check config.json against it"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name '{next(n for n in names if names.count(n) > 1)}' twice")
    return found


def is_stack(tensor: str) -> bool:
    """Return whether a buffer's `tensor` stands for several checkpoint tensors, stacked along a new first axis."""
    return _STACK.search(tensor) is not None


def members(tensor: str) -> list[str]:
    """List the checkpoint tensors that a buffer's `tensor` names: itself, or the members of a stack.

    >>> members("experts.{0:2}.up")
    ['experts.0.up', 'experts.1.up']
    """
    match = _STACK.search(tensor)
    if match is None:
        return [tensor]
    return [tensor[: match.start()] + str(i) + tensor[match.end() :] for i in range(int(match[1]))]


def tensor_rows(tensor: str) -> tuple[str, tuple[int, int] | None]:
    """Split a buffer's `tensor` into a checkpoint tensor and its rows [start, end); None: all rows.

    >>> tensor_rows("qkv.weight[8:12]"), tensor_rows("o.weight")
    (('qkv.weight', (8, 12)), ('o.weight', None))
    """
    match = _ROWS.fullmatch(tensor)
    return (tensor, None) if match is None else (match[1], (int(match[2]), int(match[3])))


class Layout:
    """The file of each tensor of a checkpoint directory, by the headers of `model.safetensors` or its shards.

    Raises
    ------
    CheckpointError
        A file missing, truncated or corrupt, or an index that does not match its shards.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory)
        self.files: dict[str, Mapping[str, TensorEntry]] = {}
        index, single = self.path / INDEX, self.path / SINGLE
        if index.is_file():
            self.where = _read_index(index)
            for name in sorted(set(self.where.values())):
                if not (self.path / name).is_file():
                    missing = sum(file == name for file in self.where.values())
                    raise wrong(
                        index, f"shard '{name}'", f"a file with {missing} tensors", "no file", "download that shard"
                    )
                self.files[name] = read_header(self.path / name)[0]
            for tensor, name in self.where.items():
                find_entry(self.path / name, self.files[name], tensor)
        elif single.is_file():
            self.files[SINGLE] = read_header(single)[0]
            self.where = dict.fromkeys(self.files[SINGLE], SINGLE)
        else:
            raise wrong(
                self.path, "the checkpoint", f"{SINGLE} or {INDEX}", "neither", "point to a checkpoint directory"
            )

    @staticmethod
    def exists(directory: str | os.PathLike[str]) -> bool:
        """Return whether a directory holds weights, not only a config.json."""
        return any((Path(directory) / name).is_file() for name in (INDEX, SINGLE))

    def find(self, name: str, shape: tuple[int, ...]) -> tuple[Path, TensorEntry]:
        """Return the file and entry of a tensor, or of rows of one, checked against the model's shape."""
        name, rows = tensor_rows(name)
        if name not in self.where:
            raise missing(self.path, name, shape, self.where)
        file = self.path / self.where[name]
        entry = self.files[file.name][name]
        if rows is not None:
            return file, _narrow(file, name, entry, rows, shape)
        if entry.shape != shape:
            raise wrong(file, f"tensor '{name}'", f"shape {list(shape)}", list(entry.shape), CONFIG)
        return file, entry

    def verify(self, weights: Iterable[tuple[str, tuple[int, ...]]], architecture: Architecture) -> None:
        """Make sure that every weight has its tensor and shape, and that no tensor is unused; constants (`=…`) aside.

        Stacks are verified member by member. If a tensor is used by rows, all its rows must be used.

        Raises
        ------
        CheckpointError
            Naming the tensor that is missing, of another shape, or unused.
        """
        taken: dict[str, int] = {}
        used: set[str] = set()
        for tensor, shape in architecture.scheme.sources(weights):
            if tensor.startswith("="):
                continue
            for name in members(tensor):
                self.find(name, shape[1:] if is_stack(tensor) else shape)
                whole, rows = tensor_rows(name)
                used.add(whole)
                if rows is not None:
                    taken[whole] = taken.get(whole, 0) + rows[1] - rows[0]
        for name, count in taken.items():
            file = self.path / self.where[name]
            found = self.files[file.name][name].shape
            if count != found[0]:
                raise wrong(file, f"tensor '{name}'", f"shape {[count, *found[1:]]}", list(found), CONFIG)
        refuse_unused(self.path, architecture.unused(self.where, used))
        for copy, original in architecture.copies.items():
            if copy in self.where:
                _, entry = self.find(original, self.files[self.where[original]][original].shape)
                self.find(copy, entry.shape)


def missing(path: Path | str, name: str, shape: Sequence[int], others: Iterable[str]) -> CheckpointError:
    """Return the error of a missing tensor, with a similar name of the same layer."""
    names = list(others)
    numbers = re.findall(r"\d+", name)
    close = difflib.get_close_matches(name, (n for n in names if re.findall(r"\d+", n) == numbers), n=1, cutoff=0.8)
    guess = f"; '{close[0]}' is called alike" if close else ""
    return CheckpointError(
        f"{path}: tensor '{name}' is missing: the model needs it with shape {list(shape)}, there are {len(names)} others"
        f"{guess}; {CONFIG}."
    )


def refuse_unused(path: Path | str, unused: Sequence[str]) -> None:
    """Refuse unused tensors: they belong to another model than the config describes.

    Raises
    ------
    CheckpointError
        Naming the first of them.
    """
    if not unused:
        return
    shown, more = ", ".join(f"'{name}'" for name in unused[:3]), len(unused) - 3
    raise CheckpointError(
        f"{path}: {len(unused)} tensor{'s' if len(unused) > 1 else ''} that the model does not use: {shown}"
        f"{f' and {more} more' if more > 0 else ''}; check config.json: it describes a model without them."
    )


def _narrow(file: Path, name: str, entry: TensorEntry, rows: tuple[int, int], shape: tuple[int, ...]) -> TensorEntry:
    """The entry of rows [start, end) of a tensor."""
    start, end = rows
    if entry.shape[1:] != shape[1:] or not entry.shape or end > entry.shape[0] or shape[0] != end - start:
        expected = f"rows [{start}, {end}) of shape {list(shape)}"
        raise wrong(file, f"tensor '{name}'", expected, list(entry.shape), CONFIG)
    row_bytes = (entry.end - entry.start) // entry.shape[0]
    return replace(entry, shape=shape, start=entry.start + start * row_bytes, end=entry.start + end * row_bytes)


def find_entry(path: Path, entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    """Look a tensor up in one file's header."""
    if name not in entries:
        found = f"{len(entries)} others"
        raise wrong(path, f"tensor '{name}'", "a tensor", found, "the index and this file do not match")
    return entries[name]


def read_header(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """Return the entries of a safetensors file, and the byte at which its data section starts."""
    try:
        with open(path, "rb") as stream:
            return _read_header(path, stream.read(8), stream.read, os.fstat(stream.fileno()).st_size)
    except OSError as error:
        raise wrong(path, "the file", "a readable file", error.strerror, "check the path") from None


def _read_header(path: Path, prefix: bytes, read: Any, size: int) -> tuple[dict[str, TensorEntry], int]:
    if len(prefix) < 8:
        raise wrong(path, "the file", "at least 8 bytes", f"{size} bytes", AGAIN)
    length = int.from_bytes(prefix, "little")
    if length > _MOST_HEADER_BYTES:
        raise wrong(path, "the header", f"at most {_MOST_HEADER_BYTES:,} bytes", f"a length of {length:,}", AGAIN)
    text = read(length)
    if len(text) < length:
        raise wrong(path, "the header", f"{length:,} bytes", f"{len(text):,} bytes before the file ends", AGAIN)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise wrong(path, "the header", "JSON with unique names", f"{error}", AGAIN) from None
    if not isinstance(header, dict):
        raise wrong(path, "the header", "a JSON object", type(header).__name__, AGAIN)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise wrong(path, "__metadata__", "a JSON object", type(metadata).__name__, AGAIN)
    entries = {name: _read_entry(path, name, entry) for name, entry in header.items()}
    _check_layout(path, entries, size - 8 - length)
    return entries, 8 + length


def _read_entry(path: Path, name: str, entry: object) -> TensorEntry:
    what = f"tensor '{name}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise wrong(path, what, "dtype, shape and data_offsets", found, AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        known = ", ".join(SAFETENSORS_DTYPES)
        raise wrong(path, what, f"a dtype of {known}", repr(dtype), "convert the checkpoint to bfloat16 first")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise wrong(path, what, "a shape and two offsets of integers >= 0", f"{shape} and {offsets}", AGAIN)
    needed = math.prod(shape) * ITEMSIZE[SAFETENSORS_DTYPES[dtype]]
    if offsets[1] - offsets[0] != needed:
        raise wrong(path, what, f"{needed:,} bytes for {dtype} {shape}", f"the offsets {offsets}", AGAIN)
    return TensorEntry(dtype=SAFETENSORS_DTYPES[dtype], shape=tuple(shape), start=offsets[0], end=offsets[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """Tensors must tile the data section: no holes, no overlaps, nothing missing at the end."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise wrong(path, f"tensor '{name}'", f"a start at byte {position:,}", f"{entry.start:,}", AGAIN)
        position = entry.end
        if position > data_bytes:
            what = f"tensor '{name}'"
            raise wrong(path, what, f"data up to byte {position:,}", f"{data_bytes:,} bytes of data", AGAIN)
    if position != data_bytes:
        raise wrong(path, "the data section", f"{position:,} bytes", f"{data_bytes:,} bytes", AGAIN)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(path, "the index", "JSON with unique names", error, "download it again") from None
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise wrong(path, "weight_map", "a mapping of tensor to file", type(where).__name__, "download it again")
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise wrong(
                path, f"tensor '{name}'", "the name of a file beside the index", repr(file), "download it again"
            )
    return where
