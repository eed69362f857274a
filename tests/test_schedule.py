"""Plans of a generation's steps together: no other place of the weights takes less time."""

from __future__ import annotations

import pytest

from mosaic.models.phase import FULL_STEP
from mosaic.models.policies.sparse_keys import SparseKeys
from mosaic.models.residency import SHARES
from mosaic.planner.planner import Planner
from mosaic.planner.schedule import scheduled

STEPS = SparseKeys(retention=0.1).steps(FULL_STEP, 65536, 32)


@pytest.mark.parametrize(
    ("budget", "host"),
    [
        ("16GiB", "64GiB"),
        ("20GiB", "0"),
        pytest.param("20GiB", "2GiB", marks=pytest.mark.soak),
        pytest.param("14GiB", "8GiB", marks=pytest.mark.soak),
    ],
)
def test_weights_lie_where_all_steps_take_the_least_time_together(budget: str, host: str) -> None:
    planner = Planner("llada-8b", device="h200", budget=budget, host_budget=host)
    for times in ({"refresh": 8, "reuse": 248}, {"refresh": 128, "reuse": 0}):
        found = scheduled(planner, STEPS, times)
        of_places = []
        for place in SHARES:
            plans = {
                name: planner.with_pinned({"stream": place}).plan(step, limit=False) for name, step in STEPS.items()
            }
            if all(plan.fits for plan in plans.values()):
                of_places.append(sum(times[name] * plan.predicted_step_ms for name, plan in plans.items()))
        assert found.fits is bool(of_places)
        assert {plan.config["stream"] for plan in found.plans.values()} == {found.stream}
        assert not of_places or found.predicted_ms <= 1.0026 * min(of_places)


def test_a_step_that_runs_seldom_does_not_have_others_stream() -> None:
    planner = Planner("llada-8b", device="h200", budget="20GiB", host_budget="64GiB")
    alone = planner.plan(STEPS["refresh"], limit=False)
    found = scheduled(planner, STEPS, {"refresh": 8, "reuse": 248})
    assert (alone.config["stream"], found.stream) == ("25%", "embedding")
    assert scheduled(planner.with_pinned({"stream": "75%"}), STEPS, {"refresh": 8, "reuse": 248}).stream == "75%"
