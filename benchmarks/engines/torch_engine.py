"""The PyTorch engines at their best: `torch.compile` in one of several ways, the attention that is fastest at a size."""

from __future__ import annotations

import gc
from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from benchmarks.bench.inputs import Inputs, make_inputs
from benchmarks.bench.meters import driver_bytes, synchronise
from benchmarks.bench.torch_engine import TorchEngine
from benchmarks.engines import sdpa
from benchmarks.engines.limits import largest
from benchmarks.engines.meters import alive_over_time, profiled
from benchmarks.engines.settings import COMPILED, SpeedSettings

__all__ = ["TunedEngine"]

_STEP_TOKENS: Final = 256
"""Granularity of the largest context."""
_MOST_TOKENS: Final = 1 << 20
_PROFILED_S: Final = 4.0
"""Longer steps are not run once more under the profiler."""
_FIRST_TRY: Final = 4096
"""Where bytes per token are measured, for a first guess at the largest context."""


class TunedEngine(TorchEngine):
    """A baseline that is compiled in one way and attends as asked for.

    Parameters
    ----------
    settings
        The benchmark.
    compiled
        Which of `COMPILED` the whole step goes through; None: it runs as it is.
    """

    settings: SpeedSettings

    def __init__(self, settings: SpeedSettings, *, compiled: str | None) -> None:
        super().__init__(settings, options=None if compiled is None else COMPILED[compiled])
        if compiled:  # the cache of traces does not know which attention backends were allowed, and would mix them up
            functorch_config.enable_autograd_cache = False
        self._compiled, self._of_one_size = compiled is not None, compiled not in (None, "dynamic")
        self._attention: sdpa.Choice = {}

    # --- one point ------------------------------------------------------------------------------------------------

    def start(self, inputs: Inputs) -> None:
        """Settle on an attention backend for this size, take the inputs, restart the meters."""
        self._settle_on_attention(inputs.tokens)
        self.take(inputs)

    def _settle_on_attention(self, tokens: int) -> None:
        found = sdpa.choose(self.settings.attention, self.arch, tokens, self.transformer.dtype, self.device)
        if self._of_one_size:
            torch.compiler.reset()  # drop code for other sizes, and the memory of its graphs
        elif self._compiled and self._attention:
            found = sdpa.keep_unless_slower(self._attention, found)
            if found["used"] != self._attention["used"]:
                torch.compiler.reset()  # traced code keeps the backend of its trace
        self._attention = found

    def step(self) -> tuple[Tensor, Tensor]:
        """Run one step; return token and confidence of the masked positions."""
        with sdpa.using(self._attention.get("forced")):
            return super().step()

    def facts(self, step_s: float) -> dict[str, Any]:
        """Return the meters' figures after the counted steps, and the average of live bytes."""
        found: dict[str, Any] = {"attention": dict(self._attention), **super().facts(step_s)}
        if step_s < _PROFILED_S:
            trace = profiled(self.step, cuda=self.cuda)
            if seen := sdpa.seen_in(trace):  # the kernels that ran have the last word
                found["attention"] |= {"used": seen, "asked": self._attention["used"]}
            alive = alive_over_time(trace, cuda=self.cuda)
            if alive is not None:
                found.setdefault("activation_peak_bytes", alive[0])
                found |= {"average_bytes": round(alive[1]), "peak_to_average": alive[0] / alive[1]}
        return found

    def warm(self) -> None:
        """Load what the first step loads, so that no point pays for it. A step for any size is traced with the attention of the
        first point, not with what is fastest for a few tokens."""
        self._settle_on_attention(self.settings.contexts[0] if self.settings.contexts else _FIRST_TRY)
        super().warm()
        if self._compiled and not self._of_one_size:
            self.step()
            synchronise(self.cuda)

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

        guess = int((cap_bytes - rest - self.held) / per_token)
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
            self.take(make_inputs(self.arch, tokens, mask_ratio, self.settings.seed))
            self.step()
            synchronise(True)
            return (torch.cuda.max_memory_reserved() - self.reserved) / tokens
        except torch.OutOfMemoryError:
            pass  # the error holds the step's tensors: free them once it is gone
        gc.collect()
        torch.cuda.empty_cache()
        return None
