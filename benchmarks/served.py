"""What the steps of a session serve: a runner between session and model that notes tokens, rows and keys of each step.

Of requests that are rows of a table it takes what the table reads; of generators, what they ask for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchmarks.floor import Floor
from mosaic.registrar.request_table import BY_BLOCKS, PACKED, Column, Reported
from mosaic.runtime.request_table import RequestTable

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.runtime.compiled import CompiledModel
    from mosaic.runtime.request_table import Served
    from mosaic.runtime.steps import StepRequest, StepResult

__all__ = ["TIMES", "Meter", "StepServed", "percentiles", "shown_times", "useful"]


class StepServed(NamedTuple):
    """What one step computed for its requests.

    Parameters
    ----------
    requests, tokens, rows
        Requests, tokens of their windows, rows to decide.
    prompts, refreshed
        Of the tokens, those of prompts, and those of requests that compute all of their sequence and decide.
    keys, pairs
        Keys that a layer reads, and pairs of a token and a key that it sees, where each sees all keys of its request.
    size
        Tokens that the step has room for.
    predicted_ms
        What its plan says that it takes.
    """

    requests: int
    tokens: int
    rows: int
    prompts: int
    refreshed: int
    keys: int
    pairs: float
    size: int
    predicted_ms: float

    def floor_s(self, floor: Floor) -> float:
        """Return the seconds that the useful part takes at least, where all attend to all keys."""
        keys = [float(self.keys)] * floor.arch.layers
        return floor.of(tokens=self.tokens, rows=self.rows, keys=keys, requests=self.requests, pairs=self.pairs)


def _served(windows: Iterable[tuple[int, int, int, int, bool]], block: int, plan: Plan) -> StepServed:
    """Add up windows: where each begins, its tokens, rows to decide, keys that are seen, and whether it is of a prompt.

    Tokens of a prompt see those of their own block and before: half of the window's, on average.
    """
    begin, tokens, rows, keys, fills = np.array([*windows], dtype=np.int64).reshape(-1, 5).T
    fills = fills > 0
    refreshes = ~fills & (begin == 0) & (tokens == keys)
    pairs = np.where(fills, tokens * (begin + (tokens + block) / 2), tokens * keys)
    return StepServed(
        requests=len(tokens), tokens=int(tokens.sum()), rows=int(rows.sum()), prompts=int(tokens[fills].sum()),
        refreshed=int(tokens[refreshes].sum()), keys=int(keys.sum()), pairs=float(pairs.sum()), size=plan.dims["tokens"],
        predicted_ms=plan.predicted_step_ms,
    )  # fmt: skip


class Meter:
    """A runner that notes what steps serve.

    Parameters
    ----------
    model
        Whose steps are run.
    tabled
        Whether requests are rows of a table; otherwise all are generators.

    Attributes
    ----------
    steps
        What each step has served, in order of their outcomes.
    """

    def __init__(self, model: CompiledModel, *, tabled: bool = True) -> None:
        self._model, self._tabled = model, tabled
        self.steps: list[StepServed] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def request_table(self) -> RequestTable | None:
        """Return a table whose steps are noted, if there is to be one."""
        if not self._tabled:
            return None
        table = RequestTable(self._model._engine)
        read = table.read

        def noted() -> Served:
            served = read()
            self._note_table(table, served)
            return served

        table.read = noted  # type: ignore[method-assign]
        return table

    def _note_table(self, table: RequestTable, served: Served) -> None:
        report = served.report
        if not len(report):
            return
        columns = table.columns[report[:, Reported.ROW]]
        begin, tokens = report[:, Reported.BEGIN], report[:, Reported.TOKENS]
        rows = served.decided
        whole = (rows > 0) & (columns[:, Column.WINDOW] != BY_BLOCKS)
        keys = np.where(whole, columns[:, Column.LENGTH], begin + tokens)
        reuses = (columns[:, Column.WINDOW] == PACKED) & (tokens < columns[:, Column.LENGTH])
        keys[reuses] = columns[reuses, Column.KEPT] + columns[reuses, Column.RENEWED]
        fills = (rows == 0) & (begin < columns[:, Column.PREFIX])
        windows = zip(*(column.tolist() for column in (begin, tokens, rows, keys, fills)), strict=True)
        self.steps.append(_served(windows, self._model.architecture.block, served.plan))

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run one step."""
        results = self._model.step(requests)
        windows = [
            (one.start, one.token_ids.numel(), one.rows.numel(), one.key_len, not one.rows.numel()) for one in requests
        ]
        self.steps.append(_served(windows, self._model.architecture.block, results[0].plan))
        return results


# --- figures of many steps ------------------------------------------------------------------------------------------------

TIMES: Final = ("a step, ms", "99th, ms", "longest, ms")


def percentiles(times_ms: Sequence[float], name: str = "") -> dict[str, float]:
    """Return the median, the 99th percentile and the largest of times.

    >>> percentiles([3.0, 1.0, 2.0])
    {'median_ms': 2.0, 'p99_ms': 3.0, 'most_ms': 3.0}
    """
    found = sorted(times_ms)
    values = statistics.median(found), found[-(-99 * len(found) // 100) - 1], found[-1]
    return dict(zip((f"{name}median_ms", f"{name}p99_ms", f"{name}most_ms"), values, strict=True))


def shown_times(point: Mapping[str, Any], name: str = "") -> list[str]:
    """Return them for a table."""
    return [f"{point[f'{name}{which}_ms']:.2f}" for which in ("median", "p99", "most")]


def useful(steps: Sequence[StepServed]) -> float:
    """Return the share of computed tokens that are of requests; the rest pads."""
    return sum(step.tokens for step in steps) / sum(step.size for step in steps)
