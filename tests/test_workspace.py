"""A workspace's arguments for the pools of its ranges: pages, budgets, holes, and immediate population."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.workspace import Workspace

PAGE = 1 << 14
CAPACITIES = dict.fromkeys(("workspace", "host"), 64 * PAGE)


@pytest.mark.parametrize("pool", ["workspace", "host"])
def test_host_and_device_commit_whole_pages_of_one_size(pool: str) -> None:
    with Workspace(pool=PagePool(page_bytes=PAGE), capacities=CAPACITIES) as workspace:
        workspace.resize(pool, 1)
        assert workspace.committed_bytes() == {pool: PAGE}
        assert workspace.host is not None and workspace.host.ledger.device == "host"
        assert workspace.ledger.device == "cpu"


GROWTHS: list[Callable[[Workspace, bool], None]] = [
    lambda w, populate: w.resize("workspace", 4 * PAGE, holes=[(PAGE, 2 * PAGE)], populate=populate),
    lambda w, populate: w.commit_all(
        {"workspace": 4 * PAGE}, holes={"workspace": [(PAGE, 2 * PAGE)]}, populate=populate
    ),
    lambda w, populate: w.resize_all(
        {"workspace": 4 * PAGE}, holes={"workspace": [(PAGE, 2 * PAGE)]}, populate=populate
    ),
]


@pytest.mark.parametrize("grow", GROWTHS)
@pytest.mark.parametrize("populate", [True, False])
def test_memory_is_touched_at_once_where_asked_and_holes_are_none(
    grow: Callable[[Workspace, bool], None], populate: bool
) -> None:
    with Workspace(pool=PagePool(page_bytes=PAGE), capacities=CAPACITIES) as workspace:
        grow(workspace, populate)
        assert workspace.committed_bytes() == {"workspace": 3 * PAGE}
        assert workspace.range("workspace").end_bytes == 4 * PAGE
        assert (workspace.resident_bytes()["workspace"] >= 3 * PAGE) is populate


@pytest.mark.parametrize("shrink", ["resize_all", "trim_all"])
def test_holes_are_given_back(shrink: str) -> None:
    with Workspace(pool=PagePool(page_bytes=PAGE), capacities=CAPACITIES) as workspace:
        workspace.resize("workspace", 4 * PAGE)
        getattr(workspace, shrink)({"workspace": 3 * PAGE}, holes={"workspace": [(PAGE, 2 * PAGE)]})
        assert workspace.committed_bytes() == {"workspace": 2 * PAGE}


def test_a_view_of_the_first_bytes_of_a_range_and_none_before() -> None:
    with Workspace(pool=PagePool(page_bytes=PAGE), capacities=CAPACITIES) as workspace:
        workspace.resize("workspace", PAGE)
        assert workspace.view("workspace", 0, (PAGE,), "uint8").numel() == PAGE
        for offset in (-1, 1):
            with pytest.raises(RuntimeMemoryError, match="does not lie, aligned"):
                workspace.view("workspace", offset, (PAGE,), "uint8")
        with pytest.raises(RuntimeMemoryError):
            workspace.view("workspace", -1, (1,), "uint8")
