"""Mosaic: an ahead-of-time memory planner and compiler library for diffusion language models.

Everything public is imported on first use; `import mosaic` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mosaic.version import __version__

__distribution__ = "mosaic-dllm"

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.decoding.live import Generation, Submission
    from mosaic.decoding.session import Session
    from mosaic.devices import DEVICES, Device, load_device
    from mosaic.errors import DoesNotFit, MosaicError, UsageError
    from mosaic.jobs import LLM, SamplingParams
    from mosaic.models.policies.flashblock import PrefixReuse
    from mosaic.models.policies.focus_options import Eviction
    from mosaic.models.policies.mage_options import SparseAttention
    from mosaic.models.policies.sparse_keys import SparseKeys
    from mosaic.planner.check import check_plan
    from mosaic.planner.custom import plan_graph, plan_program
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner, plan
    from mosaic.planner.request import Request
    from mosaic.registrar.graph import Graph
    from mosaic.registrar.operator import Implementation, Operator, Spec
    from mosaic.registrar.program import Program
    from mosaic.runtime.compile import compile
    from mosaic.runtime.compiled import CompiledModel
    from mosaic.runtime.compiled_program import CompiledProgram

_PUBLIC = {
    "CompiledModel": "mosaic.runtime.compiled",
    "CompiledProgram": "mosaic.runtime.compiled_program",
    "DEVICES": "mosaic.devices",
    "Device": "mosaic.devices",
    "DoesNotFit": "mosaic.errors",
    "Eviction": "mosaic.models.policies.focus_options",
    "Generation": "mosaic.decoding.live",
    "GenerationConfig": "mosaic.decoding.config",
    "Graph": "mosaic.registrar.graph",
    "Implementation": "mosaic.registrar.operator",
    "LLM": "mosaic.jobs",
    "MosaicError": "mosaic.errors",
    "Operator": "mosaic.registrar.operator",
    "Plan": "mosaic.planner.plan",
    "Planner": "mosaic.planner.planner",
    "PrefixReuse": "mosaic.models.policies.flashblock",
    "Program": "mosaic.registrar.program",
    "Request": "mosaic.planner.request",
    "SamplingParams": "mosaic.jobs",
    "Session": "mosaic.decoding.session",
    "SparseAttention": "mosaic.models.policies.mage_options",
    "SparseKeys": "mosaic.models.policies.sparse_keys",
    "Spec": "mosaic.registrar.operator",
    "Submission": "mosaic.decoding.live",
    "UsageError": "mosaic.errors",
    "check_plan": "mosaic.planner.check",
    "compile": "mosaic.runtime.compile",
    "load_device": "mosaic.devices",
    "plan": "mosaic.planner.planner",
    "plan_graph": "mosaic.planner.custom",
    "plan_program": "mosaic.planner.custom",
}

__all__ = [
    "DEVICES",
    "LLM",
    "CompiledModel",
    "CompiledProgram",
    "Device",
    "DoesNotFit",
    "Eviction",
    "Generation",
    "GenerationConfig",
    "Graph",
    "Implementation",
    "MosaicError",
    "Operator",
    "Plan",
    "Planner",
    "PrefixReuse",
    "Program",
    "Request",
    "SamplingParams",
    "Session",
    "SparseAttention",
    "SparseKeys",
    "Spec",
    "Submission",
    "UsageError",
    "__version__",
    "check_plan",
    "compile",
    "load_device",
    "plan",
    "plan_graph",
    "plan_program",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mosaic' has no attribute '{name}'")
    try:
        value = getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from mosaic.errors import MissingExtra

        raise MissingExtra("torch", "torch", f"mosaic.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
