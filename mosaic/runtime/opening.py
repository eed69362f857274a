"""What an engine runs on: the device that a caller names, and memory within budgets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from mosaic.errors import UsageError
from mosaic.runtime.graph_memory import GraphMemory
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.streams import shared_streams
from mosaic.runtime.workspace import Workspace

if TYPE_CHECKING:
    from mosaic.devices import Device
    from mosaic.planner.planner import Planner

__all__ = ["graph_memory", "in_use", "open_workspace", "usable_device"]

OLDEST: Final = (8, 0)
"""Compute capability of the oldest cards that every kernel is compiled and tested for."""
_log = logging.getLogger(__name__)


def usable_device(device: Device | str | None) -> Device:
    """Return the profile of a device (None: the CPU) with only the implementations that this process has.

    Plans must not ask for others.

    Raises
    ------
    UsageError
        If PyTorch sees no card, or one that is older than any kernel is compiled for.
    """
    from mosaic.devices import load_device

    profile = load_device("cpu" if device is None else device)
    if profile.backend != "cuda":
        return profile
    if not torch.cuda.is_available():
        raise UsageError(f"the device '{profile.name}' is a CUDA card, and PyTorch sees none; use device='cpu'.")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        raise UsageError(
            f"{torch.cuda.get_device_name()} has compute capability {'.'.join(map(str, capability))}, the kernels need "
            f"{'.'.join(map(str, OLDEST))} (Ampere) or later; use device='cpu'."
        )
    if "cudnn" not in profile.attention_rates:
        return profile
    from mosaic.kernels.cuda.attention_cudnn import available

    found = available()
    if found:
        return profile
    _log.warning("attention runs on Triton, which is slower: %s", found.reason)
    rates = {name: table for name, table in profile.attention_rates.items() if name != "cudnn"}
    return replace(profile, attention_rates=rates or {"triton": profile.attention_rates["cudnn"]})


def open_workspace(planner: Planner) -> Workspace:
    """Return the pages of the device and of the host that the plans are for, within the planner's budgets."""
    device = planner.device
    ledger = DeviceLedger(planner.budget_bytes, device.name)
    host_ledger = DeviceLedger(planner.host_budget_bytes, "host")
    if device.backend == "cpu":
        # Users hold views of outputs: one that outlives its memory reads zeros instead of ending the process.
        pool = PagePool(ledger, page_bytes=device.page_bytes, released="read")
        return Workspace(pool=pool, host=PagePool(host_ledger, page_bytes=device.page_bytes))
    from mosaic.runtime.cuda_driver import CudaDriver
    from mosaic.runtime.cuda_pool import CudaPool
    from mosaic.runtime.host_pool import HostPool

    torch.cuda.init()  # type: ignore[no-untyped-call]
    driver = CudaDriver(torch.cuda.current_device())
    host = HostPool(driver, host_ledger, page_bytes=device.page_bytes)
    return Workspace(pool=CudaPool(driver, ledger, page_bytes=device.page_bytes), host=host)


def graph_memory(
    ledger: DeviceLedger, device: torch.device, *, make_room: Callable[[], None], reserved_bytes: int
) -> GraphMemory:
    """Return what counts captured graphs of a device in its ledger."""
    if device.type == "cpu":
        return GraphMemory(ledger)
    shared_streams(device.index).load_for_captures()
    return GraphMemory(
        ledger, lambda: torch.cuda.mem_get_info(device)[0], lambda: torch.cuda.synchronize(device),
        make_room=make_room, reserved_bytes=reserved_bytes,
    )  # fmt: skip


def in_use() -> int:
    """Return the bytes of the current CUDA device that all processes use together."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
