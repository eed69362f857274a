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
    "test_admission": 2, "test_advice": 3, "test_bench": 4, "test_benchmarks": 14, "test_brief_graphs": 2, "test_check": 3,
    "test_check_leaves": 2, "test_check_reasons": 3, "test_check_safety": 5, "test_check_unproved": 2,
    "test_checkpoints": 2, "test_cli": 12, "test_compiling": 1, "test_config_keys": 3, "test_cost": 1, "test_cuda_pool": 3,
    "test_cut": 7, "test_decoding": 14, "test_decoding_small": 4, "test_diffusion_gemma": 4, "test_divided": 5,
    "test_evict_tokens": 3, "test_eviction": 12, "test_examples": 3, "test_experts_triton": 2, "test_few_rows": 5,
    "test_focus": 4, "test_focus_requests": 1, "test_fuzz": 2.2, "test_generate_cli": 5, "test_generation": 5,
    "test_graph_memory": 3, "test_jobs": 2, "test_kernels": 4, "test_key_change": 1, "test_kv": 11, "test_last_layer": 2,
    "test_layering": 6, "test_layers": 2, "test_limits": 4, "test_llm": 2, "test_models": 1.5, "test_moves": 7,
    "test_notebooks": 2, "test_offset_definitions": 2, "test_offset_search": 2, "test_offsets": 4, "test_offsets_exact": 1,
    "test_offsets_large": 5, "test_offsets_validity": 1, "test_open_state": 3, "test_pages": 2, "test_pages_triton": 1,
    "test_parity": 9, "test_parity_block": 13, "test_peaks": 2, "test_plan_mutations": 6, "test_planner": 13,
    "test_policy": 2, "test_prefix_reuse": 7, "test_prefixes": 9, "test_prefix_reuse_kernels": 2, "test_prefix_reuse_triton": 2,
    "test_programs": 1, "test_quality_commands": 3, "test_quality_decodability": 2, "test_quality_policies": 3,
    "test_ready": 2, "test_records": 5, "test_refusals": 5, "test_registrar": 2, "test_request_kernels": 2,
    "test_request_options": 3, "test_request_policies": 4, "test_request_table": 6, "test_robustness": 4,
    "test_rotary_scaling": 5, "test_runtime": 3, "test_runtime_compiled": 4, "test_runtime_executor": 2,
    "test_sampling": 8, "test_schedule": 9, "test_scheduler": 4, "test_search": 2, "test_selected_attention": 3,
    "test_selection": 10, "test_selection_of_keys": 3, "test_selection_of_keys_triton": 6, "test_server": 23,
    "test_server_faults": 5, "test_server_protocol": 5, "test_status_page": 4, "test_session": 5,
    "test_session_callers": 2, "test_session_interrupts": 3, "test_session_turns": 1, "test_shared_model": 3,
    "test_small_models": 4, "test_small_training": 4.5, "test_sparse_attention": 15, "test_sparse_keys": 7,
    "test_sparse_keys_rows": 3, "test_sparse_keys_triton": 2, "test_states": 3, "test_step_config": 2, "test_stream": 2,
    "test_streams": 4, "test_struck_memory": 1, "test_token_importance": 2, "test_triton_compiles": 16,
    "test_triton_kernels": 4, "test_viz": 3, "test_viz_graph": 2, "test_vocabulary": 2, "test_warm": 5,
    "test_weight_addresses": 2, "test_kernels_kept": 6, "test_bench_serve": 4, "test_likelihood": 4,
    "test_pace": 0.1, "test_groups": 0.1, "test_recent": 0.1, "test_golden": 0.2, "test_host_inputs": 0.2, "test_devices": 0.2,
    "test_deploy": 0.3, "test_server_callers": 0.2, "test_supervisor": 2, "test_answers": 0.2, "test_routing": 0.1,
    "test_simulated_device": 0.1,
}  # fmt: skip
"""Seconds of files; every other one may take `USUAL_S`."""
SLACK, COLD_S = 1.5, 12.0
"""A file fails beyond its budget times `SLACK` and `COLD_S` more: alone it compiles what others have compiled before it, numba's
functions for the most part."""
LOOP_S = 0.0095
"""The result of `_loop_s` on the machine of the budgets: half of what it was where they were measured, as they are half of what
files took there."""


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
