"""The display during generation: the canvas in a terminal, progress lines elsewhere, and the record."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from mosaic.cli.output import note
from mosaic.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from mosaic.decoding.streaming import Step
    from mosaic.viz.canvas_picture import CanvasTracker

_PICTURE_SECONDS: Final = 1 / 12
_LINE_SECONDS: Final = 5.0
_LINES_AROUND: Final = 6
"""Columns and lines of the terminal beside the text: the panel's border, the legend, the cursor."""

Clock = Callable[[], float]


class Record:
    """The numbers of every step, for `--json` and the closing line."""

    def __init__(self, *, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self.steps: list[dict[str, Any]] = []
        self.plans: dict[str, dict[str, Any]] = {}
        """The plan with the most memory, by phase."""

    def __call__(self, step: Step) -> None:
        self._last, plan = self._clock(), step.plan
        self.steps.append(
            {"step": step.step, "block": step.block, "masked": step.masked, "committed": step.positions.numel(),
             "phase": step.phase, "peak_bytes": step.peak_bytes, "seconds": step.seconds}
        )  # fmt: skip
        if step.peak_bytes >= self.plans.get(step.phase, {"peak_bytes": 0})["peak_bytes"]:
            self.plans[step.phase] = {"phase": step.phase, "peak_bytes": step.peak_bytes,
                                      "budget_bytes": plan.budget_bytes, "predicted_step_ms": plan.predicted_step_ms}  # fmt: skip

    @property
    def seconds(self) -> float:
        """From the beginning to the last step."""
        return self._last - self._began

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens a second, up to the last step."""
        return self.rate(sum(step["committed"] for step in self.steps))

    def rate(self, tokens: int) -> float:
        """Return the tokens per second."""
        return tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all plans used."""
        return max((int(plan["peak_bytes"]) for plan in self.plans.values()), default=0)

    def summary(self, tokens: int) -> str:
        """Return the closing line."""
        budget = max((int(plan["budget_bytes"]) for plan in self.plans.values()), default=0)
        return (
            f"{tokens:,} tokens in {self.seconds:.2f} s, {len(self.steps):,} steps, "
            f"{self.rate(tokens):,.1f} tokens/s; planned peak {format_bytes(self.peak_bytes)} "
            f"of {format_bytes(budget)}"
        )


class LiveView:
    """Draws the canvas in a terminal, at most twelve times a second, and clears it at the end.

    `steps` and `blocks` are the expected numbers; 0: unknown.
    """

    def __init__(
        self,
        console: Console,
        tracker: CanvasTracker,
        record: Record,
        *,
        steps: int = 0,
        blocks: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._console, self._tracker, self._record = console, tracker, record
        self._steps, self._blocks, self._clock = steps, blocks, clock
        self._drawn = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(
            self._tracker.canvas(), console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop"
        )
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, step: Step) -> None:
        """Record a step's commits; draw if it is time, or at the end."""
        self._tracker.take(step)
        if self._live is None or (step.masked and self._clock() - self._drawn < _PICTURE_SECONDS):
            return
        canvas = self._tracker.canvas(
            steps=self._steps, blocks=self._blocks, tokens_per_second=self._record.tokens_per_second,
            max_lines=max(3, self._console.height - _LINES_AROUND),
        )  # fmt: skip
        self._live.update(canvas, refresh=True)
        self._drawn = self._clock()


class Lines:
    """A progress line on stderr every few seconds, for long generations without a terminal to draw in."""

    def __init__(self, record: Record, *, clock: Clock = time.perf_counter) -> None:
        self._record, self._clock, self._said = record, clock, clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        sys.stderr.flush()

    def __call__(self, step: Step) -> None:
        """Print the progress, if it is time."""
        now = self._clock()
        if now - self._said < _LINE_SECONDS:
            return
        self._said = now
        note(
            f"step {step.step:,}, block {step.block + 1:,}, {step.masked:,} masked, "
            f"{self._record.tokens_per_second:,.1f} tokens/s, planned {format_bytes(step.peak_bytes)}"
        )
