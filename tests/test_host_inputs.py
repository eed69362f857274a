"""Inputs on their way to a device whose copies take their time: what each step finds is what was written for it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from mosaic.runtime.host_inputs import HostInputs, Numbers

ROWS = 9
DTYPES = {"ids": torch.int64, "bounds": torch.int32, "votes": torch.uint8, "scale": torch.float32}


class Queue:
    """Copies that are done when somebody waits for them, or when the device gets to them; each image as it is then."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.images, self.sent = list[Tensor](), 0

    def image(self, size: int) -> Tensor:
        self.images.append(torch.full((size,), 0xCC, dtype=torch.uint8))
        return self.images[-1]

    def send(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Queue:
        self.synchronize()  # copies are done in order
        self.waiting, self.sent = list(copies), self.sent + 1
        return self

    def synchronize(self) -> None:
        for device, image in self.waiting:
            device.copy_(image)
        self.waiting = []


def views_of(memory: Tensor) -> dict[str, Tensor]:
    """Two inputs side by side, and two far from these and from each other."""
    places = {"ids": 0, "bounds": 8 * ROWS, "votes": 20_000, "scale": 40_000}
    return {name: memory[at : at + ROWS * DTYPES[name].itemsize].view(DTYPES[name]) for name, at in places.items()}


def drawn(rng: random.Random) -> Mapping[str, Tensor | Numbers]:
    """Values of all inputs, some of fewer rows than there are: numbers, which may be those of before, and tensors."""
    count = rng.choice([1, 4, ROWS])
    start = rng.randrange(3)
    return {
        "ids": Numbers((range(start, start + count),), "int64"), "bounds": Numbers((rng.randrange(2),) * count, "int32"),
        "votes": torch.tensor(rng.choices(range(9), k=count), dtype=torch.uint8), "scale": torch.rand(count),
    }  # fmt: skip


def padded(value: Tensor | Numbers) -> Tensor:
    given = value.tensor() if isinstance(value, Numbers) else value
    return torch.cat([given, given[-1:].expand(ROWS - len(given))])


@pytest.mark.parametrize("seed", range(8))
def test_each_step_finds_what_was_written_for_it(seed: int) -> None:
    """Steps are written again and again, some while the copy of the one before waits."""
    rng, queue = random.Random(seed), Queue()
    memory = torch.zeros(50_000, dtype=torch.uint8)
    views = views_of(memory)
    inputs, known = HostInputs(views, queue), [drawn(rng)]
    expected = dict[str, Tensor]()
    assert inputs.views is views
    for step in range(40):
        values = rng.choice(known[-2:]) if rng.random() < 0.4 else drawn(rng)
        known.append(values)
        inputs.write(values)
        assert queue.sent == step + 1
        # the copy before was done as it was, before the image changed
        assert all(torch.equal(views[name], tensor) for name, tensor in expected.items())
        expected = {name: padded(value) for name, value in values.items()}
        if rng.random() < 0.5:
            queue.synchronize()
            assert all(torch.equal(views[name], tensor) for name, tensor in expected.items())


def test_numbers_that_are_there_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But tensors are, whose contents may have changed, in another mapping."""
    queue, memory = Queue(), torch.zeros(50_000, dtype=torch.uint8)
    views = {name: view for name, view in views_of(memory).items() if name in ("ids", "scale")}
    inputs, scale, made = HostInputs(views, queue), torch.ones(ROWS), list[Numbers]()
    real = Numbers.tensor
    monkeypatch.setattr(Numbers, "tensor", lambda numbers: (made.append(numbers), real(numbers))[1])
    for value in (1, 2):
        scale.fill_(value)
        inputs.write({"ids": Numbers((range(ROWS),), "int64"), "scale": scale})
        queue.synchronize()
        assert views["ids"].tolist() == [*range(ROWS)] and views["scale"].tolist() == [value] * ROWS
    assert len(made) == 1


def test_numbers_whose_writing_was_interrupted_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the values are those of the last image, or others, some of which may be equal."""
    queue, memory = Queue(), torch.zeros(50_000, dtype=torch.uint8)
    inputs = HostInputs({"ids": views_of(memory)["ids"]}, queue)
    before, values = {"ids": Numbers((range(ROWS),), "int64")}, {"ids": Numbers((5, 6), "int64")}

    def interrupted(_: Numbers) -> Tensor:
        queue.images[0].fill_(0xEE)  # as if a part were written
        raise KeyboardInterrupt

    inputs.write(before)
    for again in (before, {"ids": before["ids"]}, values):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Numbers, "tensor", interrupted)
            inputs.write(values)
        inputs.write(again)
        queue.synchronize()
        assert torch.equal(views_of(memory)["ids"], padded(again["ids"]))


def test_without_a_device_there_is_no_image() -> None:
    view = torch.zeros(ROWS, dtype=torch.int64)
    inputs, values = HostInputs({"ids": view}), {"ids": torch.tensor([7, 8])}
    inputs.write(values)
    assert view.tolist() == [7, *[8] * (ROWS - 1)]
