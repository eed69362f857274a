"""Helpers of the kernel and runtime tests: what PyTorch's allocator handed out during a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode


def _allocations(events: Iterable[Any]) -> int:
    total = 0
    for event in events:
        if event.tag == _EventType.Allocation:
            total += max(event.extra_fields.alloc_size, 0)
        total += _allocations(event.children)
    return total


def allocated_bytes(call: Callable[[], object]) -> int:
    """Count the bytes that PyTorch's CPU allocator handed out during a call, temporaries included."""
    call()  # lazy initialisation is not the step's
    with profile(profile_memory=True, use_kineto=True) as profiler:  # `torch.profiler` would make a table of all events
        call()
    return _allocations(profiler.kineto_results.experimental_event_tree())


class StorageWatch(TorchDispatchMode):
    """Collects the data pointers of the storages that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.pointers: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.pointers.add(value.untyped_storage().data_ptr())
        return result


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Give the data pointers of the storages of some tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def buffer_row(name: str, kind: str, shape: Sequence[int], dtype: str, **more: Any) -> dict[str, Any]:
    """A buffer as plan documents have it, with what most have where a test says nothing."""
    return {
        "id": 0, "name": name, "kind": kind, "pool": "workspace", "start": 0, "end": 1, "gaps": [], "alias_of": None,
        "dtype": dtype, "alignment": 512, "region": None, "tensor": None, "rotate": 1, "offset": 0, "size": 512,
        "alias_offset": 0, "shape": list(shape), **more,
    }  # fmt: skip
