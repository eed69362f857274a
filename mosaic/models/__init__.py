"""The models that Mosaic ships: presets by name, or any checkpoint directory or config.json of their families.

A `Model` knows its sizes and registers its graph; it holds no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from mosaic.errors import CheckpointError, UnknownName, UnsupportedModel
from mosaic.models import dream, fast_dllm_v2, llada, llada2, llada_moe, sdar
from mosaic.models.architecture import Architecture
from mosaic.models.config_json import FLOATS, dtype_of
from mosaic.models.phase import FULL_STEP, Phase

if TYPE_CHECKING:
    from mosaic.registrar.graph import Graph
    from mosaic.registrar.program import Program
    from mosaic.registrar.schemes.scheme import Scheme

__all__ = ["CHECKPOINTS", "FAMILIES", "PRESETS", "SHIPPED", "Model", "load", "shipped"]

FAMILIES: Final[Mapping[str, ModuleType]] = {
    module.FAMILY: module for module in (llada, dream, llada_moe, sdar, fast_dllm_v2, llada2)
}
PRESETS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    name: (family, config) for family, module in FAMILIES.items() for name, config in module.PRESETS.items()
}
SHIPPED: Final[Mapping[str, str]] = {"small": "small-llada", "small-llada": "small-llada", "small-sdar": "small-sdar"}
"""Small trained models that are part of the wheel: name -> directory in `mosaic/checkpoints`; `small` is the bidirectional one."""
CHECKPOINTS: Final = Path(__file__).parent.parent / "checkpoints"
GUIDE: Final = "To plan another model, register it as a graph: README, 'Register a model of your own'."


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that can be planned.

    Parameters
    ----------
    name
        A preset's name or the checkpoint directory's.
    family
        `llada`, `dream`, `llada-moe`, `sdar`, `fast-dllm-v2` or `llada2`.
    config
        The config.json it was read from.
    architecture
        Sizes, tensor names and dtype.
    path
        The checkpoint directory, or None for a preset.
    """

    name: str
    family: str
    config: Mapping[str, Any]
    architecture: Architecture
    path: Path | None = None

    def with_dtype(self, dtype: str) -> Model:
        """Return the same model with weights and activations in another dtype."""
        if dtype not in FLOATS:
            raise UnknownName("dtype", dtype, FLOATS)
        return replace(self, architecture=replace(self.architecture, dtype=dtype))

    def with_keys(self, dtype: str) -> Model:
        """Return the same model with keys and values kept in a dtype of their own."""
        if dtype not in FLOATS:
            raise UnknownName("dtype", dtype, FLOATS)
        return replace(self, architecture=replace(self.architecture, keys=dtype))

    def with_scheme(self, scheme: Scheme) -> Model:
        """Return the same model with the matrices of its layers stored in a scheme."""
        return replace(self, architecture=replace(self.architecture, scheme=scheme))

    def with_rope_scaling(self, kind: str, factor: float) -> Model:
        """Return the same model with another rotary scaling than its config's; base and trained positions stay.

        Raises
        ------
        UnsupportedModel
            If the scaling is unknown or its values are invalid; the message names the value.

        Examples
        --------
        >>> load("sdar-8b").with_rope_scaling("yarn", 4).architecture.max_context
        131072
        """
        rotary, scaling = self.architecture.rotary, {"rope_type": kind, "factor": factor}
        if kind == "yarn" and rotary.original:
            scaling["original_max_position_embeddings"] = rotary.original
        given = dict(self.config)
        before = {**(given.get("rope_scaling") or {}), **(given.pop("rope_parameters", None) or {})}
        kept = {key: before[key] for key in ("partial_rotary_factor",) if key in before}
        config = {**given, **kept, "rope_theta": rotary.theta, "rope_scaling": scaling}
        architecture = replace(_architecture(self.family, config), dtype=self.architecture.dtype)
        return replace(self, config=config, architecture=architecture)

    def graph(
        self, *, backend: str = "cuda", choices: Mapping[str, str] | None = None, phase: Phase = FULL_STEP,
        brief: bool = False,
    ) -> Graph:  # fmt: skip
        """Register one graph of the model's program: the full denoising step if no kind is named.

        It declares all weights of the model; a phase without a head declares those of a full step. A brief graph leaves
        out layers that repeat others, for the template compiler.

        >>> load("llada-8b").graph().name
        'full_step'
        """
        others = () if phase.head.decides else (FULL_STEP,)
        program = self.program(*others, replace(phase, graph="whole"), backend=backend)
        return program.register(phase.name, choices, brief=brief)

    def program(self, *phases: Phase, backend: str = "cuda") -> Program:
        """Return kinds of steps as a program of graphs over the model's weights, states and carries; nothing is registered yet.

        Each graph is named by its phase. A cut phase is a bucketed step of two graphs.

        >>> load("llada-8b").program(FULL_STEP).steps
        ('full_step',)
        """
        from mosaic.models.transformer import register_step  # symbolic, so only when a template has to be compiled
        from mosaic.registrar.program import Program

        program = Program(self.name, backend=backend)
        for phase in phases:
            for graph in phase.graphs:
                program.add_phase(graph.name, partial(register_step, arch=self.architecture, phase=graph))
            if (step := phase.bucketed) is not None:
                program.add_bucketed_step(
                    phase.name, step.prefix, step.suffix, count=step.count, dim=step.dim, buckets=step.buckets
                )
        return program


def load(source: str | Path | Mapping[str, Any]) -> Model:
    """Find a model by preset name, name of a shipped small one, checkpoint directory, config.json file or mapping.

    Raises
    ------
    UnknownName
        If the name is neither a preset nor a path.
    UnsupportedModel
        If the config is of a family that Mosaic does not ship.
    CheckpointError
        If a directory has no readable config.json.

    Examples
    --------
    >>> load("dream-7b").architecture.layers
    28
    """
    if isinstance(source, Mapping):
        return _from_config(dict(source), "custom", None)
    name = str(shipped(str(source)) or source)
    if name in PRESETS:
        family, config = PRESETS[name]
        return Model(name=name, family=family, config=config, architecture=_architecture(family, config))
    path = Path(name)
    if not path.exists():
        raise UnknownName(
            "model", name, (*SHIPPED, *PRESETS), "A checkpoint directory or a config.json file works too."
        )
    file = path / "config.json" if path.is_dir() else path
    return _from_config(_read_config(file), (path if path.is_dir() else path.parent).resolve().name, file.parent)


def shipped(name: str) -> Path | None:
    """Return the directory of a shipped model, or None for any other name.

    Raises
    ------
    CheckpointError
        If its files are missing from this installation.

    Examples
    --------
    >>> shipped("llada-8b") is None
    True
    """
    if name not in SHIPPED:
        return None
    path = CHECKPOINTS / SHIPPED[name]
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"the model '{name}' is not in this installation ({path} is missing): pip install --force-reinstall mosaic-dllm."
        )
    return path


def _read_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise CheckpointError(f"{file.parent} has no config.json; point to a Hugging Face checkpoint directory.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; download it again.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object; point to a model's config.json.")
    return config


def _family(config: Mapping[str, Any]) -> str:
    if "lladamoe" in str(config.get("architectures")).lower():
        return llada_moe.FAMILY
    kind = str(config.get("model_type", "")).lower()
    for family, module in FAMILIES.items():
        if kind in module.MODEL_TYPES:
            return family
    shown = config.get("model_type") or "missing model_type"
    raise UnsupportedModel(f"config.json is of the family '{shown}'; supported: {', '.join(FAMILIES)}. {GUIDE}")


def _from_config(config: dict[str, Any], name: str, path: Path | None) -> Model:
    family = _family(config)
    if family == llada2.FAMILY and llada2.edits(config, path):
        config = {**config, "model_type": llada2.EDITING}  # so that a saved copy states it
    return Model(name=name, family=family, config=config, architecture=_architecture(family, config), path=path)


def _architecture(family: str, config: Mapping[str, Any]) -> Architecture:
    module = FAMILIES[family]
    module.KEYS.check(config, module.LABEL)
    arch: Architecture = module.architecture(config)
    return replace(arch, dtype=dtype_of(config))
