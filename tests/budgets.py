"""CPU seconds that the tests of each file may take: `make test` stays within five minutes on two cores.

A run fails when a file takes more. Only tests of the test command count, with the processes that they start; what the
files import does not.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

CEILING_S = 570
"""The limit on the sum of all budgets: two cores for 300 s, less the time of collecting the tests on both."""
USUAL_S = 0.7
BUDGETS_S: Mapping[str, float] = {
    "test_admission": 3, "test_advice": 5, "test_batch": 2, "test_bench": 6, "test_benchmarks": 12, "test_check": 3,
    "test_check_leaves": 3,
    "test_check_reasons": 3, "test_check_safety": 4, "test_checkpoints": 3, "test_cli": 13, "test_compiling": 2,
    "test_config_keys": 3, "test_cost": 2, "test_cuda_pool": 4, "test_cut": 12, "test_decoding": 21,
    "test_decoding_small": 4, "test_diffusion_gemma": 3, "test_divided": 5,
    "test_evict_tokens": 3, "test_eviction": 12, "test_examples": 2,
    "test_experts_triton": 4, "test_few_rows": 6, "test_focus": 4, "test_fuzz": 5, "test_generate_cli": 4,
    "test_generation": 4, "test_jobs": 2.7,
    "test_kernels": 7, "test_kv": 14, "test_last_layer": 4, "test_layering": 4, "test_layers": 4,
    "test_limits": 6, "test_llm": 3,
    "test_models": 3, "test_moves": 8, "test_notebooks": 2, "test_offset_definitions": 2, "test_offset_search": 3,
    "test_offsets": 4, "test_offsets_exact": 2, "test_offsets_large": 6, "test_offsets_validity": 2, "test_open_state": 3,
    "test_pages": 6, "test_pages_triton": 3, "test_parity": 9, "test_parity_block": 12, "test_peaks": 2,
    "test_plan_mutations": 5, "test_planner": 16, "test_policy": 2, "test_prefix_reuse": 8, "test_prefix_reuse_kernels": 2,
    "test_prefix_reuse_triton": 3, "test_programs": 2, "test_quality_decodability": 2, "test_quality_policies": 3,
    "test_refusals": 5, "test_request_kernels": 4, "test_request_packing": 1, "test_request_table": 12,
    "test_registrar": 3, "test_robustness": 7, "test_rotary_scaling": 7, "test_runtime": 2, "test_runtime_compiled": 6,
    "test_runtime_executor": 2, "test_sampling": 11, "test_scheduler": 4,
    "test_search": 4, "test_selected_attention": 4, "test_selection": 16,
    "test_selection_of_keys": 5, "test_selection_of_keys_triton": 13, "test_session": 8, "test_session_callers": 3,
    "test_shared_model": 2, "test_small_models": 7, "test_small_training": 5,
    "test_sparse_attention": 15, "test_sparse_keys": 4, "test_sparse_keys_rows": 4, "test_sparse_keys_triton": 3,
    "test_states": 3, "test_step_config": 2, "test_stream": 5, "test_streams": 5, "test_token_importance": 2,
    "test_triton_compiles": 12, "test_triton_kernels": 6, "test_viz": 2, "test_viz_graph": 2, "test_vocabulary": 2,
    "test_weight_addresses": 4,
}  # fmt: skip
"""Measured seconds of files; every other one may take `USUAL_S`."""
SLACK, COLD_S = 1.5, 12.0
"""A file fails beyond its budget times `SLACK` and `COLD_S` more: alone it compiles what others have compiled before it, numba's
functions for the most part."""
LOOP_S = 0.0130
"""The result of `_loop_s` on the machine of the budgets."""


def budget_s(file: str) -> float:
    """CPU seconds that a file may take, by the name of its module."""
    return BUDGETS_S.get(file, USUAL_S)


def excesses(spent_s: Mapping[str, float], slowness: float) -> list[str]:
    """Say which files took too long on a machine that takes `slowness` times as long as that of the budgets."""
    allowed_s = {file: (budget_s(file) * SLACK + COLD_S) * slowness for file in spent_s}
    return [
        f"tests/{file}.py took {spent:.1f} s of CPU, and its budget of {budget_s(file):g} s allows {allowed_s[file]:.1f} s "
        f"on this machine. Make it cheaper, mark tests `soak`, or give it a larger budget in tests/budgets.py."
        for file, spent in sorted(spent_s.items())
        if spent > allowed_s[file]
    ]


class Spending:
    """Adds up the CPU seconds of every file over all workers, and fails the run where one exceeds its budget."""

    def __init__(self) -> None:
        self.spent_s: Counter[str] = Counter()
        self.slowness = slowness()
        self.found: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        before = _cpu_s()
        result = yield
        if not any(map(item.get_closest_marker, ("soak", "gpu"))):
            self.spent_s[item.path.stem] += _cpu_s() - before
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        told = getattr(node, "workeroutput", {})  # none of a worker that crashed
        self.spent_s.update(told.get("spent_s", {}))
        self.slowness = max(self.slowness, told.get("slowness", 1.0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.slowness = max(self.slowness, slowness())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput |= {"spent_s": dict(self.spent_s), "slowness": self.slowness}
            return
        self.found = excesses(self.spent_s, self.slowness)
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.found:
            terminalreporter.write_line(line, red=True)


def _cpu_s() -> float:
    """CPU seconds of this process, and of those that it started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def slowness() -> float:
    """The time of a fixed loop, as a multiple of its time on the machine of the budgets; at least 1."""
    return max(1.0, min(_loop_s() for _ in range(3)) / LOOP_S)


def _loop_s() -> float:
    before = time.process_time()
    sum(number * number % 7 for number in range(150_000))
    return time.process_time() - before
