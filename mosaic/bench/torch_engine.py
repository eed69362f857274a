"""The PyTorch engines: the official models' step, eager or through `torch.compile(dynamic=True)`."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from mosaic.bench import sdpa
from mosaic.bench.baselines import Experts, Transformer, grouped_products
from mosaic.bench.inputs import Inputs, make_inputs
from mosaic.bench.limits import largest
from mosaic.bench.meters import alive_over_time, driver_bytes, profiled, synchronise
from mosaic.bench.settings import COMPILED, Settings
from mosaic.devices import load_device
from mosaic.models import Model, load
from mosaic.runtime.checkpoint import Checkpoint
from mosaic.runtime.weights import fill_randomly, load_weights

__all__ = ["TorchEngine", "fill"]

_WARM_TOKENS: Final = 256
_STEP_TOKENS: Final = 256
"""Granularity of the largest context."""
_MOST_TOKENS: Final = 1 << 20
_PROFILED_S: Final = 4.0
"""Longer steps are not run once more under the profiler."""
_FIRST_TRY: Final = 4096
"""Where bytes per token are measured, for a first guess at the largest context."""


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
    compiled
        Which of `COMPILED` the whole step goes through, sampling included; None: it runs as it is.
    """

    def __init__(self, settings: Settings, *, compiled: str | None) -> None:
        self.settings, self.compiled = settings, compiled
        model = load(settings.model)
        if settings.dtype is not None:
            model = model.with_dtype(settings.dtype)
        self.model, self.arch = model, model.architecture
        self.cuda = load_device(settings.device).backend == "cuda"
        self.device = torch.device("cuda" if self.cuda else "cpu")
        dtype = getattr(torch, self.arch.dtype)
        grouped = self.arch.experts > 0 and grouped_products(dtype, self.device)
        self.experts: Experts = "grouped" if grouped else "loop"
        self.transformer = Transformer(
            self.arch,
            device=self.device,
            dtype=dtype,
            wide_rotary=model.family == "llada",
            experts=self.experts,
        )
        fill(self.transformer.tensors, model, settings.seed)
        if compiled:  # the cache of traces does not know which attention backends were allowed, and would mix them up
            functorch_config.enable_autograd_cache = False
        self._function = self.transformer if compiled is None else torch.compile(self.transformer, **COMPILED[compiled])
        self._of_one_size = compiled is not None and compiled != "dynamic"
        self._attention: sdpa.Choice = {}
        self._ids = torch.empty(0, dtype=torch.int64)
        self._held = self._reserved = 0

    @property
    def ratio_matters(self) -> bool:
        """Whether the step's work depends on how many rows are masked: only where the masked rows alone are sampled."""
        return self.arch.shifted

    def describe(self) -> dict[str, Any]:
        """Return what is true of every point."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.transformer.tensors.values())
        described = {
            "weights_bytes": size,
            "torch_compile": self.compiled and dict(COMPILED[self.compiled]),
            "arithmetic": "logits of all rows, argmax and softmax confidence in the model's dtype",
        }
        return {**described, "experts": self.experts} if self.arch.experts else described

    # --- one point ------------------------------------------------------------------------------------------------

    def start(self, inputs: Inputs) -> None:
        """Settle on an attention backend for this size, take the inputs, restart the meters."""
        self._settle_on_attention(inputs.tokens)
        self._take(inputs)

    def _settle_on_attention(self, tokens: int) -> None:
        found = sdpa.choose(self.settings.attention, self.arch, tokens, self.transformer.dtype, self.device)
        if self._of_one_size:
            torch.compiler.reset()  # what was compiled for another size, and the memory of its graphs
        elif self.compiled and self._attention:
            found = sdpa.keep_unless_slower(self._attention, found)
            if found["used"] != self._attention["used"]:
                torch.compiler.reset()  # what was traced keeps the backend it was traced with
        self._attention = found

    def _take(self, inputs: Inputs) -> None:
        self._ids = inputs.token_ids[None].to(self.device)
        self.settle()

    def settle(self) -> None:
        """Empty the allocator's cache and restart its peaks."""
        if self.cuda:
            synchronise(True)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._held, self._reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def step(self) -> tuple[Tensor, Tensor]:
        """Run one step; return token and confidence of the masked positions."""
        with torch.no_grad(), sdpa.using(self._forced):
            found: tuple[Tensor, Tensor] = self._function(self._ids)
            return found

    @property
    def _forced(self) -> str | None:
        forced = self._attention.get("forced")
        return forced if isinstance(forced, str) else None

    def facts(self, step_s: float) -> dict[str, Any]:
        """Return what the meters say after the counted steps."""
        found: dict[str, Any] = {"attention": dict(self._attention), "driver_bytes": driver_bytes(self.cuda)}
        if self.cuda:
            peak = torch.cuda.max_memory_allocated() - self._held
            reserved = torch.cuda.max_memory_reserved()
            found |= {
                "activation_peak_bytes": peak,
                "reserved_bytes": reserved,
                "inflation": (reserved - self._reserved) / peak - 1,
            }
        if self.settings.averages and step_s < _PROFILED_S:
            trace = profiled(self.step, cuda=self.cuda)
            if seen := sdpa.seen_in(trace):  # the kernels that ran have the last word
                found["attention"] |= {"used": seen, "asked": self._attention["used"]}
            alive = alive_over_time(trace, cuda=self.cuda)
            if alive is not None:
                found.setdefault("activation_peak_bytes", alive[0])
                found |= {"average_bytes": round(alive[1]), "peak_to_average": alive[0] / alive[1]}
        return found

    # --- the largest context --------------------------------------------------------------------------------------

    def largest_context(self, cap_bytes: int, mask_ratio: float) -> dict[str, Any]:
        """Find the largest context under a cap of device memory, the context and what else CUDA takes counted in.

        PyTorch's allocator is capped at what the measured rest leaves; a try counts if the step ran and the driver's
        counter stayed within the cap.
        """
        if not self.cuda:
            return {"max_tokens": None, "note": "PyTorch's allocator has no cap on a CPU"}
        total = torch.cuda.mem_get_info()[1]
        tries: list[dict[str, Any]] = []
        self.start(make_inputs(self.arch, _FIRST_TRY, mask_ratio, self.settings.seed))
        per_token = self._try(_FIRST_TRY, mask_ratio)
        if per_token is None:
            return {"max_tokens": None, "note": f"{_FIRST_TRY:,} tokens do not fit the card"}
        rest = self._cap(cap_bytes, total)

        def runs(tokens: int) -> bool:
            ran = self._try(tokens, mask_ratio) is not None
            used = driver_bytes(True) or 0
            if ran and used > cap_bytes:  # CUDA took more than at the last look: give the allocator less, try again
                self._cap(cap_bytes, total)
                ran, used = self._try(tokens, mask_ratio) is not None, driver_bytes(True) or 0
            tries.append({"tokens": tokens, "ran": ran, "driver_bytes": used})
            return ran and used <= cap_bytes

        guess = int((cap_bytes - rest - self._held) / per_token)
        longest = largest(runs, guess=max(guess, _STEP_TOKENS), step=_STEP_TOKENS, most=_MOST_TOKENS)
        torch.cuda.set_per_process_memory_fraction(1.0)
        return {"max_tokens": longest, "context_bytes": rest, "tries": tries}

    def _cap(self, cap_bytes: int, total: int) -> int:
        """Leave PyTorch's allocator what the rest of CUDA leaves of the cap; return that rest."""
        rest = (driver_bytes(True) or 0) - torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(max(cap_bytes - rest, 0) / total)
        return rest

    def _try(self, tokens: int, mask_ratio: float) -> float | None:
        """Run one step; return reserved activation bytes per token, None where memory ran out."""
        try:
            self._take(make_inputs(self.arch, tokens, mask_ratio, self.settings.seed))
            self.step()
            synchronise(True)
            return (torch.cuda.max_memory_reserved() - self._reserved) / tokens
        except torch.OutOfMemoryError:
            pass  # the error holds the step's tensors: free them once it is gone
        gc.collect()
        torch.cuda.empty_cache()
        return None

    def warm(self) -> None:
        """Load what the first step loads, so that no point pays for it; a compiled step is traced with the attention of the
        first point, not with what is fastest for a few tokens, and one for a single size by each point's first step."""
        self._settle_on_attention(self.settings.contexts[0] if self.settings.contexts else _FIRST_TRY)
        self._take(make_inputs(self.arch, _WARM_TOKENS, 0.5, self.settings.seed))
        if self._of_one_size:
            with torch.no_grad():
                self.transformer(self._ids)
        else:
            self.step()
        synchronise(self.cuda)

    def close(self) -> None:
        """Do nothing: the process ends."""
