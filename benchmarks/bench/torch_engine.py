"""The PyTorch engines: the official models' step, eager or through `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.bench.baselines import Experts, Transformer, grouped_products
from benchmarks.bench.inputs import Inputs, make_inputs
from benchmarks.bench.meters import driver_bytes, synchronise
from benchmarks.bench.settings import Settings
from mosaic.devices import load_device
from mosaic.models import Model, load
from mosaic.runtime.checkpoint import Checkpoint
from mosaic.runtime.weights import fill_randomly, load_weights

__all__ = ["TorchEngine", "fill"]

_WARM_TOKENS: Final = 256


def fill(tensors: Mapping[str, Tensor], model: Model, seed: int) -> None:
    """Give tensors the values that `mosaic.compile` gives the model's weights: of its checkpoint, or drawn by name."""
    if model.path is None:
        fill_randomly(tensors, seed=seed)
        return
    with Checkpoint(model.path) as checkpoint:
        load_weights(tensors, checkpoint, model.architecture)


class TorchEngine:
    """A baseline with the weights that Mosaic would have: drawn by name from the same seed, or of the same checkpoint.

    Parameters
    ----------
    settings
        The benchmark.
    options
        Of `torch.compile`, through which the whole step goes then, sampling included; None: it runs as it is.
    """

    def __init__(self, settings: Settings, *, options: Mapping[str, Any] | None) -> None:
        self.settings, self.options = settings, options
        model = load(settings.model)
        if settings.dtype is not None:
            model = model.with_dtype(settings.dtype)
        self.model, self.arch = model, model.architecture
        self.cuda = load_device(settings.device).backend == "cuda"
        self.device = torch.device("cuda" if self.cuda else "cpu")
        dtype = getattr(torch, self.arch.dtype)
        grouped = self.arch.feed_forward.experts > 0 and grouped_products(dtype, self.device)
        self.experts: Experts = "grouped" if grouped else "loop"
        self.transformer = Transformer(
            self.arch, device=self.device, dtype=dtype, wide_rotary=model.family == "llada", experts=self.experts
        )
        fill(self.transformer.tensors, model, settings.seed)
        self._function = self.transformer if options is None else torch.compile(self.transformer, **options)
        self._ids = torch.empty(0, dtype=torch.int64)
        self.held = self.reserved = 0

    @property
    def ratio_matters(self) -> bool:
        """Whether the step's work depends on how many rows are masked: only where the masked rows alone are sampled."""
        return self.arch.shifted

    def describe(self) -> dict[str, Any]:
        """Return what is true of every point."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.transformer.tensors.values())
        described = {
            "weights_bytes": size,
            "torch_compile": None if self.options is None else dict(self.options),
            "arithmetic": "logits of all rows, argmax and softmax confidence in the model's dtype",
        }
        return {**described, "experts": self.experts} if self.arch.feed_forward.experts else described

    def start(self, inputs: Inputs) -> None:
        """Take the inputs, and restart the meters."""
        if self.options is not None:
            torch.compiler.reset()  # what was compiled for another size
        self.take(inputs)

    def take(self, inputs: Inputs) -> None:
        """Bring the inputs to the device, and restart the meters."""
        self._ids = inputs.token_ids[None].to(self.device)
        self.settle()

    def settle(self) -> None:
        """Empty the allocator's cache and restart its peaks."""
        if self.cuda:
            synchronise(True)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.held, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def step(self) -> tuple[Tensor, Tensor]:
        """Run one step; return token and confidence of the masked positions."""
        with torch.no_grad():
            found: tuple[Tensor, Tensor] = self._function(self._ids)
            return found

    def facts(self, step_s: float) -> dict[str, Any]:
        """Return what the meters say after the counted steps."""
        if not self.cuda:
            return {}
        peak, reserved = torch.cuda.max_memory_allocated() - self.held, torch.cuda.max_memory_reserved()
        return {
            "driver_bytes": driver_bytes(True), "activation_peak_bytes": peak, "reserved_bytes": reserved,
            "inflation": (reserved - self.reserved) / peak - 1,
        }  # fmt: skip

    def warm(self) -> None:
        """Load what the first step loads, so that no point pays for it; it is compiled by each point's first step."""
        self.take(make_inputs(self.arch, _WARM_TOKENS, 0.5, self.settings.seed))
        with torch.no_grad():
            self.transformer(self._ids)
        synchronise(self.cuda)

    def close(self) -> None:
        """Do nothing: the process ends."""
