"""Results copied from the device to the host, with one wait for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from mosaic.runtime.streams import device_lost

ALIGNED: Final = 16
"""Alignment in bytes of every result in the host buffer, enough for every dtype."""
KEPT: Final = 256
"""Layouts of results that are remembered: usually one per executor and number of rows."""
NEAR: Final = 4096
"""Gaps of up to this many bytes are copied along: about what a bus moves while a second copy starts."""


class Arriving:
    """Copies on their way to the host: views of the host buffer, and the event after the last copy."""

    def __init__(self, results: list[Tensor], sent: torch.cuda.Event | None) -> None:
        self._results, self._sent = results, sent

    @property
    def are_here(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        try:
            return self._sent is None or bool(self._sent.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def wait(self) -> list[Tensor]:
        """Wait for all of them; return tensors of the shapes and dtypes that were asked for.

        Raises
        ------
        DeviceLost
            If the device stopped meanwhile.
        """
        if self._sent is not None:
            try:
                self._sent.synchronize()
            except Exception as error:
                lost = device_lost(error)
                if lost is None:
                    raise
                raise lost from error
        return self._results


class HostCopy:
    """Copies tensors into one host buffer, which grows to the largest results so far and is pinned for a device.

    From pageable memory every copy would block the host.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._laid: dict[object, tuple[list[tuple[Tensor, Tensor]], list[Tensor]]] = {}
        self._sent: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[Tensor]) -> Arriving:
        """Begin to copy contiguous tensors of one device to the host.

        Their views are valid until the next call.
        """
        device = tensors[0].device
        key = tuple([(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors])
        if key not in self._laid:
            if len(self._laid) >= KEPT:
                self._laid.clear()
            self._laid[key] = self._lay(tensors)
        copies, results = self._laid[key]
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        if device.type != "cuda":
            return Arriving(results, None)
        self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sent.record(torch.cuda.current_stream(device))
        return Arriving(results, self._sent)

    def _lay(self, tensors: Sequence[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """The copies to make, and the views of the results."""
        device, found = tensors[0].device, spans(tensors)
        total = sum(2 * ALIGNED + size for _, size, _ in found)
        if total > self._buffer.numel():
            size = 1 << (total - 1).bit_length()
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._laid.clear()
        results, at = [tensor.to("cpu") if not tensor.numel() else tensor for tensor in tensors], 0
        copies = []
        for first, size, members in found:
            at += -at % ALIGNED + first.data_ptr() % ALIGNED
            target = self._buffer[at : at + size]
            copies.append((target, bytes_of(first, size)))
            for place, offset in members:
                results[place] = view_like(tensors[place], target, offset)
            at += size
        return copies, results


def bytes_of(first: Tensor, size: int) -> Tensor:
    """Return `size` bytes of a tensor's storage from the tensor's first byte on, as uint8."""
    found = torch.empty(0, dtype=torch.uint8, device=first.device)
    return found.set_(first.untyped_storage(), first.storage_offset() * first.element_size(), (size,))  # type: ignore[call-overload,no-any-return]


def view_like(tensor: Tensor, image: Tensor, offset: int) -> Tensor:
    """View the bytes of an image from `offset` on as a tensor of this shape and dtype."""
    return image[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def spans(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, list[tuple[int, int]]]]:
    """Group contiguous tensors that lie near each other in one storage.

    Returns
    -------
    list of (Tensor, int, list of (int, int))
        For each group: its first tensor, its bytes, and for each member the index in `tensors` and the byte offset
        in the group.
    """
    order = sorted((i for i, tensor in enumerate(tensors) if tensor.numel()), key=lambda i: tensors[i].data_ptr())
    groups: list[list[int]] = []
    for i in order:
        if groups and _near(tensors[groups[-1][-1]], tensors[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    found = []
    for group in groups:
        first = tensors[group[0]]
        members = [(i, tensors[i].data_ptr() - first.data_ptr()) for i in group]
        found.append((first, max(offset + tensors[i].nbytes for i, offset in members), members))
    return found


def _near(before: Tensor, after: Tensor) -> bool:
    shared = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return shared and after.data_ptr() - (before.data_ptr() + before.nbytes) <= NEAR
