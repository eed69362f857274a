"""The CUDA card of this machine for calibration: its clock, its kernels, and the fixed memory of a process.

The fixed part is measured with a separate process, which runs small models and waits; this one reads the device's
counter before and meanwhile. No other process may start or end on the card during that time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from mosaic.calibration.measure import (
    QUICK,
    Bench,
    Call,
    FixedPart,
    attention_rates,
    few_rows_rates,
    gemm_rates,
    launch_times,
    unembed_rates,
)
from mosaic.devices import Device, load_device, to_toml
from mosaic.errors import MosaicError, RuntimeMemoryError
from mosaic.kernels import load
from mosaic.version import __version__

_REPEATS: Final = range(3, 51)
_WARM_UP_S: Final = 0.5
_HELPER: Final = "from mosaic.calibration.cuda_card import hold_models; import sys; hold_models(sys.argv[1])"
DENSE: Final[dict[str, Any]] = {
    "model_type": "llada", "d_model": 1024, "n_layers": 2, "n_heads": 8, "mlp_hidden_size": 2048,
    "embedding_size": 4096, "mask_token_id": 4095, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS: Final[dict[str, Any]] = {
    "model_type": "lladamoe", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_experts": 8, "num_experts_per_tok": 2, "expert_intermediate_size": 512, "vocab_size": 4096,
    "mask_token_id": 4095, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Configurations of the models whose steps are run: dense, and with experts."""
_BATCHES: Final = ((64,), (2000,), (300, 500))
"""Lengths of the sequences in their steps."""


_SETTLING: Final = 20_000
"""Most runs before a measurement."""


class CudaTimer:
    """A clock of CUDA events on a stream of its own.

    One measurement repeats for `target_s`, at least three times. Before it, the calls run uncounted for `SETTLE` times
    as long: a card at its power limit lowers its clock after a fraction of a second, as during a step.
    """

    SETTLE: ClassVar[int] = 3

    def __init__(self, target_s: float) -> None:
        self._target_s, self._stream = target_s, torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def captured(self, calls: Sequence[Call]) -> float:
        """Capture the calls into one CUDA graph and replay it."""
        with torch.cuda.stream(self._stream):
            self._prepare(calls)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
            return self._median(graph.replay) / len(calls)

    def eager(self, calls: Sequence[Call]) -> float:
        """Launch the calls one by one."""

        def run() -> None:
            for call in calls:
                call()

        with torch.cuda.stream(self._stream):
            self._prepare(calls)
            return self._median(run) / len(calls)

    def _prepare(self, calls: Sequence[Call]) -> None:
        """Run until kernels are compiled, graphs built and workspaces allocated."""
        self._stream.wait_stream(torch.cuda.default_stream())  # operands are written there
        for call in dict.fromkeys(calls):
            call()
        self._stream.synchronize()

    def _median(self, run: Call) -> float:
        run()
        once = self._seconds(run, 1)[0]
        repeats = min(max(int(self._target_s / once), _REPEATS.start), _REPEATS.stop - 1)
        for _ in range(min(int(self.SETTLE * self._target_s / once), _SETTLING)):
            run()
        return statistics.median(self._seconds(run, repeats))

    def _seconds(self, run: Call, repeats: int) -> list[float]:
        """Time repetitions without gaps between them: a card that rests in between raises its clock."""
        events = [_event() for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def cuda_bench(*, target_s: float) -> Bench:
    """Open the first CUDA card that this process sees, warmed up; `RuntimeMemoryError` without one."""
    if not torch.cuda.is_available():
        raise RuntimeMemoryError(
            f"calibrating measures a CUDA card, and PyTorch {torch.__version__} sees none: run it on the machine with the "
            "card, with a PyTorch that is built for CUDA (nvidia-smi shows what the driver sees)."
        )
    properties = torch.cuda.get_device_properties(0)
    torch.manual_seed(0)
    warm_up()
    return Bench(
        title=properties.name,
        device="cuda:0",
        backend="cuda",
        memory_bytes=torch.cuda.mem_get_info()[1],
        cache_bytes=int(properties.L2_cache_size),
        versions=_versions(),
        timer=CudaTimer(target_s),
        load=lambda operator, implementation: load(operator, "cuda", implementation),
        pinned=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True),
        free_bytes=_free_bytes,
        capability=10 * properties.major + properties.minor,
        processors=properties.multi_processor_count,
    )


def _free_bytes() -> int:
    """By the driver's counter, after emptying the cache of PyTorch's allocator."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    for package, name in (("triton", "triton"), ("nvidia-cudnn-frontend", "cuDNN frontend")):
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        **found,
        "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "mosaic": __version__,
    }


def warm_up() -> None:
    """Bring clocks and temperature to the values of a running model."""
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda:0")
    y = torch.empty_like(x)
    start, end = _event(), _event()
    start.record()
    while True:
        for _ in range(20):
            torch.mm(x, x, out=y)
        end.record()
        end.synchronize()
        if start.elapsed_time(end) >= 1e3 * _WARM_UP_S:
            return


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_fixed_part(
    device: Device, *, free_bytes: Callable[[], int] = _free_bytes, helper: str = _HELPER, timeout_s: float = 120.0
) -> FixedPart:
    """Run a helper process that loads what a step loads, and read the device's counter before and meanwhile.

    Parameters
    ----------
    free_bytes
        Reads the counter.
    helper
        Python code of the process. Its argument is the device's profile file. It prints its bytes as one line of JSON
        and waits for the end of its input.

    Raises
    ------
    RuntimeMemoryError
        If that process fails.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "errors", "w+") as errors:
        profile = Path(folder) / "card.toml"
        profile.write_text(to_toml(device), encoding="utf-8")
        before = free_bytes()
        command = [sys.executable, "-c", helper, str(profile)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            limit = threading.Timer(timeout_s, process.kill)
            limit.start()
            try:
                assert process.stdout is not None
                answer = process.stdout.readline()
                meanwhile = free_bytes()
            finally:
                limit.cancel()
                process.communicate()  # closes its input, which ends it
        if not answer:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it was stopped, or took too long"])[-1]
            raise RuntimeMemoryError(f"the process that measures context and libraries failed: {last}")
    held = json.loads(answer)
    return FixedPart(used_bytes=before - meanwhile, **held)


def hold_models(profile: str) -> None:
    """Load kernels, run small models, print the bytes of the process that are pages, and wait for the end of the input.

    It runs in the process that `measure_fixed_part` starts.
    """
    device = load_device(profile)
    load_kernels(cuda_bench(target_s=0.0))
    with ExitStack() as models:
        pages, note = 0, ""
        try:
            pages = sum(run_model(models, config, device) for config in (DENSE, EXPERTS))
        except (MosaicError, RuntimeError) as error:
            models.close()
            note = f"context and libraries were measured without a model's step: {' '.join(str(error).split())}"
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = {"pages_bytes": pages, "library_bytes": torch.cuda.memory_reserved(), "note": note}
        sys.stdout.write(json.dumps(held) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


def run_model(
    models: ExitStack, config: dict[str, Any], device: Device, batches: Sequence[Sequence[int]] = _BATCHES
) -> int:
    """Run steps of one model, which stays open, and return the bytes of its pages."""
    from mosaic.runtime.compile import compile

    model = models.enter_context(compile(config, device=device))
    for lengths in batches:
        sequences = [torch.full((length,), config["mask_token_id"], dtype=torch.int64) for length in lengths]
        model(sequences if len(sequences) > 1 else sequences[0])
    return sum(size for pool, size in model.memory().committed.items() if pool != "host")


def load_kernels(bench: Bench) -> None:
    """Load the largest modules, used or not: cuBLAS, every attention, products of few rows, fused unembedding."""
    once = replace(bench, timer=_Once())
    sizes = replace(QUICK, rows=(128,), columns=(4096,), vocabulary=4096, attention=QUICK.attention[:1])
    launch_times(once, sizes)
    gemm_rates(once, sizes, 0.0, notes=[], progress=lambda what: None)
    few_rows_rates(once, sizes, 0.0)
    unembed_rates(once, sizes, 0.0)
    unembed_rates(once, sizes, 0.0, sampled=True)
    attention_rates(once, sizes, 0.0, notes=[], progress=lambda what: None)


class _Once:
    """No clock: every call runs once, on the stream of steps, so that no other stream gets workspaces."""

    def captured(self, calls: Sequence[Call]) -> float:
        """Run the calls; the returned seconds are meaningless."""
        for call in calls:
            call()
        return 1.0

    eager = captured
