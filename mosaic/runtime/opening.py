"""What an engine runs on: the device that a caller names, and memory within budgets."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from mosaic.devices import GRAPH_BYTES, load_device
from mosaic.errors import MissingExtra, PlanFormatError, UsageError
from mosaic.kernels.card import Card, card_ahead
from mosaic.registrar.operators.kv_attention import HOPPER
from mosaic.runtime.graph_memory import MOST_BYTES, SHARE, GraphMemory
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.streams import shared_streams
from mosaic.runtime.workspace import Workspace

if TYPE_CHECKING:
    from mosaic.devices import Device
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner
    from mosaic.registrar.operator import Implementation, Operator

__all__ = [
    "card_capability",
    "current_card",
    "device_ahead",
    "graph_memory",
    "in_use",
    "open_workspace",
    "refuse_other_cards",
    "usable_device",
]

OLDEST: Final = 80
"""Compute capability of the oldest cards that every kernel is compiled and tested for."""
_log = logging.getLogger(__name__)


def usable_device(device: Device | str | None) -> Device:
    """Return the profile of a device (None: the CPU) with only the implementations that this process has.

    Plans must not ask for others, so its compute capability is that of the card that PyTorch sees.

    Raises
    ------
    UsageError
        If PyTorch sees no card, or one that is older than any kernel is compiled for.
    """
    profile = load_device("cpu" if device is None else device)
    if profile.backend != "cuda":
        return profile
    if not torch.cuda.is_available():
        raise UsageError(f"the device '{profile.name}' is a CUDA card, and PyTorch sees none; use device='cpu'.")
    capability = card_capability()
    if capability < OLDEST:
        raise UsageError(
            f"{torch.cuda.get_device_name()} has compute capability {capability / 10}, the kernels need {OLDEST / 10} (Ampere) or "
            "later; use device='cpu'."
        )
    return _with_installed(replace(profile, capability=capability))


def card_capability() -> int:
    """Return the compute capability of the current card, 90 for sm_90; 0 if PyTorch sees none. For launches ahead, of theirs."""
    ahead = card_ahead()
    if ahead is not None:
        return ahead.capability
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def current_card() -> Card:
    """Return what launchers ask of the current card."""
    return Card(card_capability(), torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def device_ahead(device: Device | str | None) -> tuple[Device, Card]:
    """Return the profile of a card that need not be there, with the implementations that this environment has, and what launchers
    ask of the card.

    Raises
    ------
    UsageError
        If it is no card, or kernels are not compiled for it.
    """
    profile = load_device(device)
    if profile.backend != "cuda":
        raise UsageError(f"the device '{profile.name}' is no CUDA card: it has no kernels to compile.")
    if profile.capability < OLDEST:
        raise UsageError(
            f"the profile '{profile.name}' has capability {profile.capability}, kernels are compiled for {OLDEST} (Ampere) and "
            "later: write `capability = 90` (sm_90) or the like into it."
        )
    return _with_installed(profile), Card(profile.capability, profile.processors)


def _with_installed(profile: Device) -> Device:
    """A profile with only the implementations that are installed."""
    profile = profile if _has_kernels_of(profile.capability) else replace(profile, capability=0)
    if "cudnn" not in profile.attention_rates:
        return profile
    from mosaic.kernels.cuda.attention_cudnn import available

    found = available()
    if found:
        return profile
    _log.warning("attention runs on Triton, which is slower: %s", found.reason)
    rates = {name: table for name, table in profile.attention_rates.items() if name != "cudnn"}
    return replace(profile, attention_rates=rates or {"triton": profile.attention_rates["cudnn"]})


def _has_kernels_of(capability: int) -> bool:
    """Tell whether the installed Triton has what kernels for cards of this very capability are written in."""
    if capability != HOPPER:
        return True
    try:
        importlib.import_module("mosaic.kernels.cuda.kv_attention_hopper")
    except (MissingExtra, UsageError) as error:
        _log.warning("attention over kept keys runs on the plain kernel, which is slower: %s", error)
        return False
    return True


def refuse_other_cards(operator: Operator, way: Implementation) -> None:
    """Refuse an implementation for cards that the current one is not.

    Raises
    ------
    PlanFormatError
        Naming the operator, the implementation and both capabilities.
    """
    if way.capability is None or way.runs_on(found := card_capability()):
        return
    raise PlanFormatError(
        f"the plan carries out '{operator.name}' by '{way.name}', which needs a card of compute capability "
        f"{way.capability}, this machine's is {found}: plan for this card."
    )


def open_workspace(planner: Planner, *, ahead: bool = False) -> Workspace:
    """Return the pages of the device and of the host that the plans are for, within the planner's budgets; `ahead` of a device
    that is not there, none of which is touched."""
    device = planner.device
    ledger = DeviceLedger(planner.budget_bytes, device.name)
    host_ledger = DeviceLedger(planner.host_budget_bytes, "host")
    if device.backend == "cpu" or ahead:
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


def graph_memory(plan: Plan, planner: Planner, device: torch.device, set_aside: Callable[[int], bool]) -> GraphMemory:
    """Return what keeps the captured graphs of a device; a CPU has none, but sets as much aside where plans are for a card."""
    if planner.device.backend == "cpu":
        return GraphMemory(most_bytes=0)
    reserved = min(GRAPH_BYTES, plan.components["context"])
    left = planner.budget_bytes - sum(plan.components[fixed] for fixed in ("context", "library", "weights"))
    most = min(MOST_BYTES, max(left // SHARE, reserved))
    if device.type == "cpu":
        return GraphMemory(set_aside=set_aside, most_bytes=most, reserved_bytes=reserved)
    shared_streams(device.index).load_for_captures()
    return GraphMemory(
        lambda: torch.cuda.mem_get_info(device)[0], lambda: torch.cuda.synchronize(device), set_aside=set_aside,
        most_bytes=most, reserved_bytes=reserved,
    )  # fmt: skip


def in_use() -> int:
    """Return the bytes of the current CUDA device that all processes use together."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
