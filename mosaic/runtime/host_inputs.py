"""Inputs written from the host to where the plan has them; on a device, through one pinned image of their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mosaic.runtime.batch import fill_rows
from mosaic.runtime.host_copy import bytes_of, spans, view_like


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers one after another. They compare equal by value, so values that a buffer already has need not be written.

    Parameters
    ----------
    parts
        All numbers, or all ranges of integers.
    dtype
        By name.
    width
        Numbers per row; 0: the tensor has one axis.

    Examples
    --------
    >>> numbers = Numbers((range(3), range(7, 9)), "int32")
    >>> len(numbers), numbers.tensor().tolist(), numbers == Numbers((range(3), range(7, 9)), "int32")
    (5, [0, 1, 2, 7, 8], True)
    """

    parts: tuple[float, ...] | tuple[range, ...]
    dtype: str
    width: int = 0

    def __len__(self) -> int:
        return sum(len(part) if isinstance(part, range) else 1 for part in self.parts) // (self.width or 1)

    def tensor(self) -> Tensor:
        """Make a tensor [n] of them, or [n, width]."""
        dtype = getattr(torch, self.dtype)
        if self.width:
            return torch.tensor(self.parts, dtype=dtype).view(-1, self.width)
        ranges = [part for part in self.parts if isinstance(part, range)]
        if not ranges:
            return torch.tensor(self.parts, dtype=dtype)
        found = [torch.arange(part.start, part.stop, dtype=dtype) for part in ranges]
        return found[0] if len(found) == 1 else torch.cat(found)


class PinnedLink:
    """Copies bytes of the host to a device: pinned memory, copied on a CUDA device's current stream.

    Parameters
    ----------
    device
        The destination.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._sent = device, torch.cuda.Event()  # type: ignore[no-untyped-call]

    def image(self, size: int) -> Tensor:
        """Return memory of the host that the device copies from, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, copies: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Begin to copy images, of each the device's bytes and the image, which stays as it is until the last call's event."""
        for device, image in copies:
            device.copy_(image, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))
        return self._sent


class HostInputs:
    """Writes the inputs of an executor.

    A device gets them from a pinned image, in one copy per contiguous span. Values that the image has already are not
    written again; the bytes between inputs hold nothing before a step.

    Parameters
    ----------
    inputs
        The executor's input views, by name.
    link
        To their device; a `PinnedLink` if not given, none on a CPU.
    """

    def __init__(self, inputs: Mapping[str, Tensor], link: PinnedLink | None = None) -> None:
        self.views, self._targets = inputs, dict(inputs)
        self._images: list[tuple[Tensor, Tensor]] = []  # of each span: the device's bytes, and their image
        self._written: dict[str, Numbers] = {}
        self._sent: torch.cuda.Event | None = None
        self._last: Mapping[str, Tensor | Numbers] | None = None  # what the images have
        self._there: dict[str, Tensor] = {}  # of that, what is on the device already
        names, tensors = [*inputs], [*inputs.values()]
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if link is None and device is not None:
            link = PinnedLink(device)
        self._link = link
        if link is None:
            return
        for first, size, members in spans(tensors):
            image = link.image(size)
            self._images.append((bytes_of(first, size), image))
            for place, offset in members:
                self._targets[names[place]] = view_like(tensors[place], image, offset)

    def write(self, values: Mapping[str, Tensor | Numbers]) -> None:
        """Write values by name; if there are fewer than the plan has rows, the last one is repeated.

        On a device the copy goes to the current stream; values that are already on the device are copied after it. The
        mapping of the last call is not read again: its values must not change.
        """
        self._fill(values)
        if self._link is not None and self._images:
            self._sent = self._link.send(self._images)
        for name, value in (self._there if self._images else values).items():
            fill_rows(self.views[name], _tensor(value))

    def _fill(self, values: Mapping[str, Tensor | Numbers]) -> None:
        """Write the values of the host into the pinned images, if there are any."""
        if not self._images or self._last is values:
            return
        if self._sent is not None:
            self._sent.synchronize()  # usually done long ago; not if steps were launched ahead
        self._last, self._there = None, {}
        for name, value in values.items():
            if isinstance(value, Numbers) and self._written.get(name) == value:
                continue
            self._written.pop(name, None)  # if interrupted, it is written again
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self._there[name] = value
                continue
            fill_rows(self._targets[name], _tensor(value))
            if isinstance(value, Numbers):
                self._written[name] = value
        self._last = values


def _tensor(value: Tensor | Numbers) -> Tensor:
    return value.tensor() if isinstance(value, Numbers) else value
