"""The benchmarks of the engine under load, on a CPU with tiny models: what they count is what requests need by their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_request_table import CONFIGS

import mosaic
from benchmarks import serving
from benchmarks.record import table
from benchmarks.served import Meter
from mosaic.decoding import Session
from mosaic.devices import load_device
from mosaic.runtime.compiled import CompiledModel

CPU = load_device("cpu")
WAY: dict[str, Any] = {"steps": 2, "remasking": "low_confidence_static"}


@pytest.fixture(scope="module")
def sdar() -> Iterator[CompiledModel]:
    """Blocks of 4 tokens."""
    with mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0) as model:
        yield model
        assert model.state_rows == {}


@pytest.mark.parametrize("tabled", [True, False])
def test_a_meter_notes_what_each_step_serves(sdar: CompiledModel, tabled: bool) -> None:
    """Two requests of 9 tokens and blocks [8, 12), [12, 16): a prompt of 8, then two steps a block, of which the second block's
    first computes both blocks."""
    meter = Meter(sdar, tabled=tabled)
    with Session(meter) as session:
        for _ in range(2):
            session.submit([7] * 9, gen_length=7, stop_at_eos=False, **WAY)
        while session.live:
            session.advance()
    found = [(step.requests, step.prompts, step.tokens, step.rows, step.keys, step.pairs) for step in meter.steps]
    prompt, last = (2, 16, 16, 0, 16, 2 * 8 * 6.0), (2, 0, 8, 4, 32, 2 * 4 * 16.0)
    if tabled:
        first, second = (2, 0, 8, 6, 24, 2 * 4 * 12.0), (2, 0, 8, 2, 24, 2 * 4 * 12.0)
        assert found == [prompt, first, second, (2, 0, 16, 8, 32, 2 * 8 * 16.0), last]
    else:  # whose steps have rows for the whole block
        assert found[0] == prompt and found[-1] == (2, 0, 8, 8, *last[4:])
    assert all(step.size >= step.tokens for step in meter.steps)
    assert all(step.floor_s(serving.Floor(sdar.architecture, CPU)) > 0 for step in meter.steps)


def test_requests_at_once_are_timed_and_counted(sdar: CompiledModel) -> None:
    found = serving.at_once(sdar, CPU, 3, prompt=9, answer=7, **WAY)
    assert found["steps"] == 5 and found["new_sizes"] == 0 and 0 < found["useful"] <= 1
    assert 0 < found["step_ms"] <= found["p99_ms"] <= found["most_ms"] and found["python_calls"] > 10
    assert found["tokens_per_s"] == pytest.approx(3 * 7 / (5e-3 * found["step_ms"]), rel=0.9)
    result = {"what": "at-once", "points": [{"count": 3, **found}]}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 2


def test_a_device_is_busy_while_any_kernel_runs() -> None:
    assert serving.busy_ms([(0, 2000), (5000, 6000), (1000, 3000), (1200, 1300)]) == 4.0
