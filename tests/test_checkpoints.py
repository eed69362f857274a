"""Checkpoints: every way a safetensors file can be wrong is one clear sentence; good ones load to the bit."""

from __future__ import annotations

import errno
import gc
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeDriver
from runtime_helpers import allocated_bytes, buffer_row
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mosaic
from mosaic.devices import load_device
from mosaic.errors import CheckpointError, RuntimeMemoryError
from mosaic.models import load
from mosaic.models.safetensors import Layout, members, tensor_rows
from mosaic.planner.planner import Planner
from mosaic.runtime.checkpoint import PIECE_BYTES, Checkpoint, SafetensorsFile
from mosaic.runtime.cuda_pool import CudaPool
from mosaic.runtime.host_pool import HostPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.weights import (
    adopt_tensors,
    fill_randomly,
    load_weights,
    save_checkpoint,
)
from mosaic.runtime.workspace import Workspace

TINY: dict[str, Any] = {
    "model_type": "Dream", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "vocab_size": 32, "mask_token_id": 31, "torch_dtype": "float32",
}  # fmt: skip
ARCHITECTURE = load(TINY).architecture


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7, generator=generator),
        "b.bias": torch.randn(3, generator=generator).bfloat16(),
        "c": torch.arange(4, dtype=torch.int64),
        "d": torch.randn(2, 2, generator=generator).double(),
        "e": torch.zeros(0, 4),
        "f": torch.tensor(1.5).half(),
    }


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: Any, data: bytes, *, text: bytes | None = None, length: int | None = None) -> None:
    text = json.dumps(header).encode() if text is None else text
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def test_reads_what_safetensors_writes(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.names) == sorted(tensors())
        for name, expected in tensors().items():
            out = torch.empty_like(expected)
            checkpoint.copy_into(name, out)
            assert torch.equal(out, expected)


def test_reads_tensors_at_odd_offsets(tmp_path: Path) -> None:
    value = torch.arange(6, dtype=torch.float32)
    header = {
        "pad": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [3, 27]},
    }
    write(tmp_path / "model.safetensors", header, b"\x01\x02\x03" + value.numpy().tobytes())
    with Checkpoint(tmp_path) as checkpoint:
        out = torch.empty(2, 3)
        checkpoint.copy_into("x", out)
        assert torch.equal(out.view(-1), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_converts_between_floating_dtypes_without_a_second_copy(folder: Path, dtype: torch.dtype) -> None:
    with Checkpoint(folder) as checkpoint:
        for name in ("a.weight", "b.bias", "d"):
            expected = tensors()[name]
            out = torch.empty_like(expected, dtype=dtype)
            assert allocated_bytes(lambda name=name, out=out: checkpoint.copy_into(name, out)) == 0
            assert torch.equal(out, expected.to(dtype))
        with pytest.raises(CheckpointError, match="tensor 'c': expected float32, found int64"):
            checkpoint.copy_into("c", torch.empty(4))


Corruption = Callable[[Path, dict[str, Any], bytes], None]


def changed(name: str, **fields: Any) -> Corruption:
    return lambda path, header, data: write(path, {**header, name: {**header[name], **fields}}, data)


CORRUPTIONS: dict[str, tuple[Corruption, str]] = {
    "empty": (lambda p, h, d: p.write_bytes(b"") and None, "at least 8 bytes, found 0 bytes"),
    "7 bytes": (lambda p, h, d: p.write_bytes(b"1234567") and None, "found 7 bytes"),
    "header cut": (lambda p, h, d: write(p, h, b"", length=100_000), "header: expected 100,000 bytes"),
    "header huge": (lambda p, h, d: write(p, h, d, length=1 << 60), "at most 100,000,000 bytes"),
    "not json": (lambda p, h, d: write(p, h, d, text=b"{oops"), "JSON with unique names"),
    "not utf-8": (lambda p, h, d: write(p, h, d, text=b'{"\xff": 1}'), "JSON with unique names"),
    "twice": (lambda p, h, d: write(p, h, d, text=b'{"a": 1, "a": 2}'), "the name 'a' twice"),
    "a list": (lambda p, h, d: write(p, [], d), "a JSON object, found list"),
    "metadata": (lambda p, h, d: write(p, {**h, "__metadata__": 3}, d), "__metadata__"),
    "no entry": (lambda p, h, d: write(p, {**h, "c": 3}, d), "tensor 'c': expected dtype, shape and data_offsets"),
    "extra key": (changed("c", extra=1), "tensor 'c': expected dtype, shape and data_offsets"),
    "dtype": (changed("c", dtype="F8_E4M3"), r"tensor 'c': expected a dtype of .* found 'F8_E4M3'"),
    "dtype list": (changed("c", dtype=[]), "tensor 'c': expected a dtype"),
    "shape text": (changed("c", shape="4"), "integers >= 0"),
    "shape negative": (changed("c", shape=[-4]), "integers >= 0"),
    "shape bool": (changed("c", shape=[True]), "integers >= 0"),
    "shape float": (changed("c", shape=[4.0]), "integers >= 0"),
    "shape product": (changed("c", shape=[5]), "expected 40 bytes for I64"),
    "offsets three": (changed("c", data_offsets=[0, 1, 2]), "two offsets"),
    "offsets reversed": (changed("c", data_offsets=[32, 0]), "expected 32 bytes"),
    "truncated": (lambda p, h, d: write(p, h, d[:-1]), "bytes of data"),
    "trailing": (lambda p, h, d: write(p, h, d + b"x"), "the data section"),
    "hole": (lambda p, h, d: write(p, {k: v for k, v in h.items() if k != "a.weight"}, d), "expected a start at byte"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_file_is_refused_in_one_line(folder: Path, name: str) -> None:
    corrupt, message = CORRUPTIONS[name]
    path = folder / "model.safetensors"
    corrupt(path, *header_of(path))
    with pytest.raises(CheckpointError, match=message) as refusal:
        SafetensorsFile(path)
    text = str(refusal.value)
    assert str(path) in text and "\n" not in text and "expected" in text and "found" in text


def test_a_deeply_nested_header_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    write(path, {}, b"", text=b'{"a":' * 100_000)
    with pytest.raises(CheckpointError, match="header"):
        SafetensorsFile(path)


def test_any_damaged_byte_of_the_header_is_refused_or_harmless(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    end = len(whole) - len(header_of(path)[1])
    for position in range(end):
        for value in (0x00, 0x22, 0x39, 0xFF):
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                file = SafetensorsFile(path)
            except CheckpointError:
                continue
            for name, entry in file.entries.items():
                file.read_into(name, torch.empty(entry.end - entry.start, dtype=torch.uint8))
            file.close()


def test_overlapping_tensors_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    header, data = header_of(path)
    header["again"] = dict(header["c"])
    write(path, header, data)
    with pytest.raises(CheckpointError, match="expected a start at byte"):
        SafetensorsFile(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or .*index.json, found neither"):
        Checkpoint(tmp_path)


# --- shards -----------------------------------------------------------------------------------------------------------


def shard(folder: Path, **changes: str) -> None:
    parts: dict[str, dict[str, Tensor]] = {"one.safetensors": {}, "two.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors().items()):
        list(parts.values())[i % 2][name] = tensor
    for file, content in parts.items():
        save_file(content, folder / file)
    where = {name: file for file, content in parts.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {**where, **changes}})
    )


def test_reads_shards(tmp_path: Path) -> None:
    shard(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        for name, expected in tensors().items():
            out = torch.empty_like(expected)
            checkpoint.copy_into(name, out)
            assert torch.equal(out, expected)


def test_a_missing_shard_or_tensor_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"shard 'two.safetensors': expected a file with 3 tensors, found no file"
    ):
        Checkpoint(tmp_path)
    shard(tmp_path, ghost="one.safetensors")
    with pytest.raises(CheckpointError, match=r"one.safetensors: tensor 'ghost'"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../one.safetensors", "/etc/passwd", "", 3])
def test_an_index_may_not_point_elsewhere(tmp_path: Path, file: Any) -> None:
    shard(tmp_path, a=file)
    with pytest.raises(CheckpointError, match="the name of a file beside the index"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"a":1,"a":2}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        Checkpoint(tmp_path)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_tensor_is_read_to_its_place_and_never_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values = tmp_path / "model.safetensors", torch.randn(1 << 18)
    save_file({"a": values}, path)
    targets: list[int] = []
    preadv = os.preadv

    def watched(file: int, buffers: list[memoryview], offset: int) -> int:
        targets.extend(np.asarray(buffer).__array_interface__["data"][0] for buffer in buffers)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    monkeypatch.setattr("mosaic.runtime.checkpoint.PIECE_BYTES", 1 << 18)
    out = torch.empty(1 << 18)
    with Checkpoint(tmp_path) as checkpoint:
        assert str(path) not in Path("/proc/self/maps").read_text()
        checkpoint.copy_into("a", out)
    assert torch.equal(out, values) and targets == [out.data_ptr() + piece * (1 << 18) for piece in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_join_whatever_their_size(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(37, 11)
    save_file({"a": values}, tmp_path / "model.safetensors")
    monkeypatch.setattr("mosaic.runtime.checkpoint.PIECE_BYTES", 104)
    preadv = os.preadv
    # as little at once as the system likes
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:97]], offset))
    with Checkpoint(tmp_path) as checkpoint:
        out = torch.empty(37, 11, dtype=dtype)
        checkpoint.copy_into("a", out)
        assert torch.equal(out, values.to(dtype))
        save_checkpoint(tmp_path / "copy", {"a": out}, {})
    assert torch.equal(load_file(tmp_path / "copy" / "model.safetensors")["a"], out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_cut_short_while_it_is_read_is_refused(
    tmp_path: Path, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, path)
    monkeypatch.setattr("mosaic.runtime.checkpoint.PIECE_BYTES", 1024)
    with Checkpoint(tmp_path) as checkpoint:
        out = torch.empty(1000, dtype=dtype, device=device)
        os.truncate(path, path.stat().st_size - 1500)
        checkpoint.copy_into("a", out)
        with pytest.raises(
            CheckpointError, match=r"tensor 'b': expected 4,000 bytes, found the file's end after 2,500"
        ):
            checkpoint.copy_into("b", out)


def test_a_file_that_cannot_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with (
        Checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match="'c': expected readable bytes, found Inp"),
    ):
        checkpoint.copy_into("c", torch.empty(4, dtype=torch.int64))


def test_files_are_closed_when_one_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path)

    class Vanishing(Layout):
        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            (tmp_path / "two.safetensors").unlink()

    monkeypatch.setattr("mosaic.runtime.checkpoint.Layout", Vanishing)
    with pytest.raises(CheckpointError, match="No such file"):
        Checkpoint(tmp_path)
    gc.collect()  # an open file would warn, and warnings are errors


def test_a_checkpoint_truncated_while_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    """Into device memory and pinned memory of a fake driver; afterwards everything is as before."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, path)
    whole, driver = path.read_bytes(), FakeDriver(1 << 30)
    for cut in (1500, 0):
        with Workspace(pool=CudaPool(driver, DeviceLedger()), host=HostPool(driver, DeviceLedger())) as workspace:
            workspace.resize_all({"weights": 4000, "host": 4000})
            views = {"a": workspace.view("weights", 0, (1000,), "float32")}
            views["b"] = workspace.view("host", 0, (1000,), "float32")
            with Checkpoint(tmp_path) as checkpoint:
                os.truncate(path, len(whole) - cut)
                if cut:
                    with pytest.raises(CheckpointError, match="found the file's end"):
                        load_weights(views, checkpoint)
                else:
                    load_weights(views, checkpoint)
                    assert bool((views["a"] == 1).all()) and bool((views["b"] == 1).all())
            views.clear()
        path.write_bytes(whole)
        gc.collect()
        assert driver.is_empty() and workspace.ledger.committed_bytes == 0


# --- the weights of a plan --------------------------------------------------------------------------------------------


def test_loads_plain_tensors_stacks_and_constants(tmp_path: Path) -> None:
    parts = {f"experts.{i}.up": torch.full((2, 3), float(i)) for i in range(3)}
    save_file({**parts, "norm": torch.ones(4)}, tmp_path / "model.safetensors")
    views = {
        "experts.{0:3}.up": torch.empty(3, 2, 3),
        "norm": torch.empty(4, dtype=torch.bfloat16),
        "=inv_freq:theta=500000.0,dim=8": torch.empty(4),
    }
    with Checkpoint(tmp_path) as checkpoint:
        load_weights(views, checkpoint)
    assert torch.equal(views["experts.{0:3}.up"], torch.stack(list(parts.values())))
    assert views["norm"].tolist() == [1.0] * 4
    expected = 500000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(views["=inv_freq:theta=500000.0,dim=8"].double(), expected, rtol=1e-6, atol=0)
    with pytest.raises(CheckpointError, match=r"constant '=ones' .* is unknown"):
        fill_randomly({"=ones": torch.empty(3)})


def test_random_weights_depend_on_their_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mosaic.runtime.weights.PIECE_BYTES", 256)
    one = {"x": torch.empty(10, 20), "l.{0:2}.w": torch.empty(2, 7, 3), "norm": torch.empty(50)}
    other = {"l.1.w": torch.empty(7, 3), "x": torch.empty(10, 20), "qkv.bias": torch.empty(50)}
    for views in (one, other):
        fill_randomly(views, seed=3)
    assert torch.equal(one["x"], other["x"]) and torch.equal(one["l.{0:2}.w"][1], other["l.1.w"])
    pieces = one["x"].view(-1).split(64)
    assert len({float(piece[0]) for piece in pieces}) == 4  # one generator goes on from piece to piece
    assert abs(float(one["norm"].mean()) - 1) < 0.02 and abs(float(other["qkv.bias"].mean())) < 0.02
    fill_randomly(other, seed=4)
    assert not torch.equal(one["x"], other["x"])
    again = {"x": torch.empty(10, 20)}
    fill_randomly(again, seed=3, staging=torch.empty(256, dtype=torch.uint8))  # on the device of the view: not used
    assert torch.equal(again["x"], one["x"])


def test_what_goes_through_the_staging_is_drawn_first(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("mosaic.runtime.weights.draw", lambda out, *_: drawn.append(out.device.type))
    views = {f"w{i}": torch.empty(4, device=where) for i, where in enumerate(("meta", "cpu", "meta", "cpu"))}
    fill_randomly(views, staging=torch.empty(PIECE_BYTES, dtype=torch.uint8, device="meta"))
    assert drawn == ["cpu", "cpu", "meta", "meta"]


def test_a_staging_that_is_too_small_is_refused() -> None:
    with pytest.raises(RuntimeMemoryError, match=r"needs 32\.00 MiB of staging on the device, 1\.00 MiB were given"):
        fill_randomly({}, staging=torch.empty(1 << 20, dtype=torch.uint8))


def test_a_tensor_that_the_model_needs_is_missed_by_name(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        with pytest.raises(
            CheckpointError, match=r"tensor 'lm_head.weight' is missing: .* shape \[9, 2\], .* 6 others;"
        ):
            load_weights({"lm_head.weight": torch.empty(9, 2)}, checkpoint)
        with pytest.raises(CheckpointError, match=r"tensor 'a.weights' is missing: .*; 'a.weight' is called alike"):
            load_weights({"a.weights": torch.empty(5, 7)}, checkpoint)
        with pytest.raises(CheckpointError, match=r"tensor 'a.weight': expected shape \[7, 5\], found \[5, 7\]"):
            load_weights({"a.weight": torch.empty(7, 5)}, checkpoint)


def fused_views(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Three parts of one tensor, not in the order of its rows."""
    return {f"qkv.weight[{a}:{b}]": torch.empty(b - a, 3, dtype=dtype) for a, b in ((4, 6), (0, 4), (6, 8))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_fused_tensor_are_loaded_and_written_back(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mosaic.runtime.checkpoint.PIECE_BYTES", 20)
    values = torch.randn(8, 3)
    save_file({"before": torch.ones(5), "qkv.weight": values}, tmp_path / "model.safetensors")
    views = fused_views(dtype)
    with Checkpoint(tmp_path) as checkpoint:
        assert "qkv.weight[0:4]" in checkpoint and "qkv.bias[0:4]" not in checkpoint
        load_weights(views, checkpoint)
    for name, view in views.items():
        a, b = map(int, name[:-1].split("[")[1].split(":"))
        assert torch.equal(view, values[a:b].to(dtype))
    save_checkpoint(tmp_path / "copy", {"scalar": torch.tensor(2.0), **views}, {})
    written = load_file(tmp_path / "copy" / "model.safetensors")
    assert written.keys() == {"scalar", "qkv.weight"} and written["scalar"] == 2.0
    assert torch.equal(written["qkv.weight"], values.to(dtype))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7, 3), r"'qkv.weight': expected rows \[6, 8\) of shape \[2, 3\], found \[7, 3\]"),
        ((8, 4), r"expected rows \[4, 6\) of shape \[2, 3\], found \[8, 4\]"),
        ((9, 3), r"'qkv.weight': expected shape \[8, 3\], found \[9, 3\]; check config.json"),
    ],
)
def test_a_fused_tensor_of_another_size_is_refused(tmp_path: Path, shape: tuple[int, int], message: str) -> None:
    save_file({"qkv.weight": torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Layout(tmp_path).verify(((name, tuple(view.shape)) for name, view in fused_views().items()), ARCHITECTURE)


def test_rows_of_a_parameter_are_adopted() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 3))
    record = document(tensor="qkv.weight[4:6]")
    adopted = adopt_tensors(record, {"qkv.weight": parameter})["qkv.weight[4:6]"]
    assert adopted.data_ptr() == parameter[4].data_ptr() and adopted.shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"the module: tensor 'qkv.weight\[4:6\]' is missing: .* shape \[2, 3\]"):
        adopt_tensors(record, {})


def test_random_rows_of_a_bias_are_around_zero() -> None:
    views = {"qkv.bias[0:50]": torch.empty(50), "norm": torch.empty(50)}
    fill_randomly(views)
    assert abs(float(views["qkv.bias[0:50]"].mean())) < 0.02 and abs(float(views["norm"].mean()) - 1) < 0.02


def test_members_of_a_stack() -> None:
    assert members("a.b") == ["a.b"]
    assert members("l.3.e.{0:2}.w") == ["l.3.e.0.w", "l.3.e.1.w"]


def document(**fields: Any) -> Mapping[str, Any]:
    return {"buffers": [buffer_row("w", "weight", (2, 3), "float32", **{"tensor": "w", **fields})]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "tensor 'w' is missing"),
        ({"w": torch.ones(3, 2)}, r"found float32 \[3, 2\]"),
        ({"w": torch.ones(2, 3).double()}, r"found float64"),
        ({"w": torch.ones(3, 2).t()}, "non-contiguous"),
        ({"w": torch.ones(2, 3, device="meta")}, "on meta"),
    ],
)
def test_parameters_that_cannot_be_adopted_are_refused(state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        adopt_tensors(document(), state)


def test_adoption_shares_memory_and_leaves_stacks_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    adopted = adopt_tensors(document(), {"w": parameter})
    assert adopted["w"].data_ptr() == parameter.data_ptr() and not adopted["w"].requires_grad
    elsewhere = torch.ones(2, 3, device="meta")
    assert adopt_tensors(document(), {"w": elsewhere}, device="meta")["w"].device.type == "meta"
    with pytest.raises(CheckpointError, match=r"expected float32 \[2, 3\] on meta, found float32 \[2, 3\] on cpu"):
        adopt_tensors(document(), {"w": parameter}, device="meta")
    with pytest.raises(CheckpointError, match="members of a stack, which lie apart"):
        adopt_tensors(document(tensor="e.{0:2}.w"), {"e.0.w": parameter})


def test_saving_writes_a_checkpoint_that_others_read(tmp_path: Path) -> None:
    views = {
        "e.{0:2}.w": torch.randn(2, 3, 4).bfloat16(),
        "x": torch.randn(5),
        "=inv_freq:theta=10000.0,dim=8": torch.ones(4),
    }
    save_checkpoint(tmp_path / "new", views, {"model_type": "llada"})
    stored = load_file(tmp_path / "new" / "model.safetensors")
    assert list(stored) == ["e.0.w", "e.1.w", "x"]
    assert torch.equal(stored["e.1.w"], views["e.{0:2}.w"][1]) and torch.equal(stored["x"], views["x"])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]


# --- checkpoints of a model, whole ------------------------------------------------------------------------------------


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "torch_dtype": "float32",
        "vocab_size": 32,
        "mask_token_id": 31,
    }
    known = {
        "dream": TINY,
        "llada": {
            "model_type": "llada", "d_model": 16, "n_layers": 2, "n_heads": 2, "mlp_hidden_size": 24, "vocab_size": 32,
            "mask_token_id": 31, "torch_dtype": "float32",
        },
        "llada2": {
            **TINY, "model_type": "llada2_moe", "num_hidden_layers": 2, "head_dim": 8, "moe_intermediate_size": 8,
            "num_shared_experts": 1, "first_k_dense_replace": 1, **experts,
        },
    }  # fmt: skip
    return {**known[family], **changes}


def saved(tmp_path: Path, config: Mapping[str, Any], **more: Tensor) -> dict[str, Tensor]:
    """Write a random checkpoint of a model with further tensors, and return its tensors."""
    with mosaic.compile(config) as model:
        model.save(tmp_path)
    whole = {**load_file(tmp_path / "model.safetensors"), **more}
    save_file(whole, tmp_path / "model.safetensors")
    return whole


def refusal(path: Path) -> str:
    """The error of both planning by headers and loading."""
    with pytest.raises(CheckpointError) as loading, mosaic.compile(path):
        pass
    with pytest.raises(CheckpointError) as planning:
        Planner(load(path), device=load_device("cpu")).verify_checkpoint()
    assert str(loading.value) == str(planning.value)
    return str(loading.value)


@pytest.mark.some
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llada", {"n_layers": 1}),
        ("llada2", {"num_hidden_layers": 1}),
        ("llada2", {"num_experts": 3}),
        ("llada2", {"num_shared_experts": 0}),
        ("llada2", {"use_qk_norm": False}),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_that_nothing_uses_are_refused_by_name(
    tmp_path: Path, family: str, change: dict[str, Any], sharded: bool
) -> None:
    config = config_of(family)
    whole = saved(tmp_path, config)
    if sharded:
        (tmp_path / "model.safetensors").unlink()
        names = sorted(whole)
        where = {name: f"{i % 3}.safetensors" for i, name in enumerate(names)}
        for file in set(where.values()):
            save_file({name: whole[name] for name in names if where[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    mosaic.compile(tmp_path).close()
    smaller = {**config, **change}
    with mosaic.compile(smaller) as model:
        needed = {whole for name in model.weights() for member in members(name) for whole in (tensor_rows(member)[0],)}
    more = set(whole) - needed
    (tmp_path / "config.json").write_text(json.dumps(smaller))
    if family == "llada2" and change == {"num_experts": 3}:  # the router's rows come first
        assert "mlp.gate" in refusal(tmp_path)
        return
    text = refusal(tmp_path)
    assert f": {len(more)} tensors that the model does not use: " in text
    assert sum(f"'{name}'" in text for name in more) == min(3, len(more))


def test_harmless_tensors_are_left_alone_and_others_are_not(tmp_path: Path) -> None:
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    saved(tmp_path, TINY, **frequencies)
    mosaic.compile(tmp_path).close()
    saved(tmp_path, TINY, **frequencies, **{"model.layers.0.self_attn.o_proj.bias": torch.ones(16)})
    assert "1 tensor that the model does not use: 'model.layers.0.self_attn.o_proj.bias'; check" in refusal(tmp_path)


def test_a_tied_head_may_be_in_the_checkpoint_if_it_is_the_embedding(tmp_path: Path) -> None:
    config = {**TINY, "tie_word_embeddings": True}
    whole = saved(tmp_path, config)
    assert "lm_head.weight" not in whole
    table = whole["model.embed_tokens.weight"]
    saved(tmp_path, config, **{"lm_head.weight": table.clone()})
    mosaic.compile(tmp_path).close()
    changed = table.clone()
    changed[7, 3] += 1.0
    saved(tmp_path, config, **{"lm_head.weight": changed})
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' is not equal to 'model.embed_tokens.weight', but config"
    ):
        mosaic.compile(tmp_path)
    saved(tmp_path, config, **{"lm_head.weight": table[:5].clone()})
    assert "tensor 'lm_head.weight': expected shape [32, 16], found [5, 16]" in refusal(tmp_path)


def test_a_head_that_is_not_there_is_missing(tmp_path: Path) -> None:
    whole = saved(tmp_path, TINY)
    save_file(
        {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors"
    )
    assert "tensor 'lm_head.weight' is missing: the model needs it with shape [32, 16]" in refusal(tmp_path)


class Module(nn.Module):
    """A module with given parameters and a config, as Hugging Face's have."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config, self._weights = dict(config), {name: nn.Parameter(tensor) for name, tensor in weights.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self._weights)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._weights.values())


def test_a_module_with_parameters_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path, TINY)
    mosaic.compile(Module(TINY, whole)).close()
    spare = {**whole, "model.layers.1.mlp.up_proj.weight": torch.ones(24, 16)}
    for state in (spare, {name.removeprefix("model."): tensor for name, tensor in spare.items()}):
        with pytest.raises(CheckpointError, match=r"the module: 1 tensor .* not use: '.*layers.1.mlp.up_proj.weight'"):
            mosaic.compile(Module(TINY, state))
    tied = {**TINY, "tie_word_embeddings": True}
    mosaic.compile(Module(tied, {**whole, "lm_head.weight": whole["model.embed_tokens.weight"]})).close()
    with pytest.raises(CheckpointError, match=r"the module: tensor 'lm_head.weight' is not equal to"):
        mosaic.compile(Module(tied, whole))
    with pytest.raises(CheckpointError, match=r"the module: tensor 'lm_head.weight' is missing"):
        mosaic.compile(Module(TINY, {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}))
