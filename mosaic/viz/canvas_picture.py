"""The canvas of a generation as it fills in: every token by its state, the plan's memory beside it.

For terminals (rich) and notebooks. Inputs are plain lists and numbers; no tokenizer, no torch. Every state has a second
cue beside its colour; without colour only that cue remains.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from mosaic.errors import UsageError
from mosaic.units import format_bytes
from mosaic.viz.palette import COLORS, ink_on

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

CellState: TypeAlias = Literal["mask", "low", "medium", "high", "earlier"]
LOW: Final = 0.5
"""Confidence below which a token is `low`."""
HIGH: Final = 0.9
"""Confidence from which on a token is `high`."""

MASK_GLYPH: Final = "░"
ASCII_MASK_GLYPH: Final = "_"
_NEWLINE: Final = "↵"
_BESIDE_COLUMNS: Final = 64
"""Narrowest terminal in which the memory stands beside the canvas; below it stands beneath."""
_PANEL_COLUMNS: Final = 27


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The look of one state: `style` is rich's, `css` the notebook's."""

    label: str
    color: str
    style: str
    css: str


STATES: Final[Mapping[CellState, _Look]] = {
    "mask": _Look(label="mask", color=COLORS["scratch"], style="dim", css=""),
    "low": _Look(
        label=f"low, below {LOW:g}", color=COLORS["logits and head"], style="italic underline",
        css="font-style:italic;text-decoration:underline dotted",
    ),
    "medium": _Look(label="medium", color=COLORS["attention"], style="underline", css="text-decoration:underline"),
    "high": _Look(label=f"high, from {HIGH:g}", color=COLORS["ffn"], style="bold", css="font-weight:bold"),
    "earlier": _Look(label="earlier", color="", style="", css=""),
}  # fmt: skip
"""Look of each state: `mask` not yet decided; `low`, `medium`, `high` decided just now; `earlier` in an earlier step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One position of the canvas.

    `text` is the text that its token adds: it may be empty (part of a character) or hold newlines, and is ignored for
    `mask`. `confidence` is the token's when it was committed.
    """

    state: CellState = "mask"
    text: str = ""
    confidence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the plan in force: its peak over everything on the device, and the budget."""

    phase: str
    peak_bytes: int
    budget_bytes: int

    @property
    def share(self) -> float:
        """Peak over budget, in [0, 1]."""
        return min(1.0, self.peak_bytes / self.budget_bytes) if self.budget_bytes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters; `steps` and `blocks` are 0 if the algorithm does not know them beforehand."""

    step: int
    masked: int
    steps: int = 0
    block: int = 0
    blocks: int = 0
    tokens_per_second: float = 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Return labels and values, as people read them."""
        found = [("step", _of(self.step, self.steps))]
        if self.block or self.blocks:
            found.append(("block", _of(self.block, self.blocks)))
        found.append(("masked", f"{self.masked:,}"))
        if self.tokens_per_second:
            found.append(("tokens/s", f"{self.tokens_per_second:,.1f}"))
        return found


def _of(number: int, total: int) -> str:
    return f"{number:,} of {total:,}" if total else f"{number:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasPicture:
    """One moment of a generation. Prints itself in a terminal (rich) and in a notebook; `str()` is its plain text.

    Parameters
    ----------
    cells
        The positions to be generated, in order.
    progress, memory
        The figures beside the text, or None.
    max_lines
        Show at most this many lines of text, around the first mask; None shows all.

    Examples
    --------
    >>> str(CanvasPicture(cells=[Cell(state="earlier", text="Once"), Cell(state="low", text=" upon"), Cell()]))
    'Once upon░'
    """

    cells: Sequence[Cell]
    title: str = ""
    progress: Progress | None = None
    memory: Memory | None = None
    max_lines: int | None = None

    def __str__(self) -> str:
        return self.plain()

    def plain(self, *, ascii_only: bool = False) -> str:
        """Return the text with a glyph for every mask, and nothing else."""
        glyph = ASCII_MASK_GLYPH if ascii_only else MASK_GLYPH
        return "".join(glyph if cell.state == "mask" else printable(cell.text) for cell in self.cells)

    # --- terminals ----------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        ascii_only = options.ascii_only
        beside = options.max_width >= _BESIDE_COLUMNS
        facts = self._facts(ascii_only)
        width = options.max_width - (_PANEL_COLUMNS + 2 if beside and facts.plain else 0)
        text, shown = self._window(console, max(width - 4, 8), ascii_only)
        panel = Panel(text, title=Text(self.title) if self.title else None, title_align="left", subtitle=shown or None,
                      subtitle_align="right", border_style="dim", width=width, padding=(0, 1))  # fmt: skip
        legend = self._legend(ascii_only)
        if not facts.plain:
            yield Group(panel, legend)
        elif beside:
            grid = Table.grid(padding=(0, 1))
            grid.add_column(width=width)
            grid.add_column(width=_PANEL_COLUMNS)
            grid.add_row(panel, Group(Text(), facts))
            yield Group(grid, legend)
        else:
            yield Group(panel, facts, legend)

    def _window(self, console: Console, width: int, ascii_only: bool) -> tuple[Text, str]:
        """The lines around the first mask, and their range and total as text ("" for all lines)."""
        from rich.text import Text

        lines = list(self._text(ascii_only).wrap(console, width, overflow="fold", tab_size=4))
        if self.max_lines is None or len(lines) <= self.max_lines:
            return Text("\n").join(lines), ""
        glyph = ASCII_MASK_GLYPH if ascii_only else MASK_GLYPH
        focus = next((at for at, line in enumerate(lines) if glyph in line.plain), len(lines))
        start = max(0, min(focus - self.max_lines // 2, len(lines) - self.max_lines))
        end = start + self.max_lines
        return Text("\n").join(lines[start:end]), f"lines {start + 1:,} to {end:,} of {len(lines):,}"

    def _text(self, ascii_only: bool) -> Text:
        from rich.text import Text

        glyph, newline = (ASCII_MASK_GLYPH, "\\n") if ascii_only else (MASK_GLYPH, _NEWLINE)
        text = Text()
        for state, cells in groupby(self.cells, key=lambda cell: cell.state):
            shown = "".join(glyph if state == "mask" else printable(cell.text) for cell in cells)
            if ascii_only:
                shown = shown.encode("ascii", "replace").decode()
            if state not in ("mask", "earlier"):  # a newline alone has no colour to be seen
                shown = shown.replace("\n", f"{newline}\n")
            text.append(shown, _style(state))
        return text

    def _facts(self, ascii_only: bool) -> Text:
        """Counters and memory, a line each."""
        from rich.text import Text

        facts = Text()
        for label, value in self.progress.rows() if self.progress else ():
            facts.append(f"{label:<9}", "dim").append(f"{value}\n")
        if self.memory is not None:
            memory = self.memory
            facts.append(f"{'plan':<9}", "dim").append(f"{memory.phase}\n")
            facts.append(f"{'peak':<9}", "dim").append(f"{format_bytes(memory.peak_bytes)}\n", "bold")
            facts.append(f"{'budget':<9}", "dim").append(f"{format_bytes(memory.budget_bytes)}\n")
            facts.append(bar(memory.share, _PANEL_COLUMNS - 8, ascii_only=ascii_only), COLORS["hidden"])
            facts.append(f" {memory.share:.1%}")
        return facts

    def _legend(self, ascii_only: bool) -> Text:
        from rich.text import Text

        legend = Text()
        for state, look in STATES.items():
            glyph = f"{ASCII_MASK_GLYPH if ascii_only else MASK_GLYPH} " if state == "mask" else ""
            label = (glyph + look.label).replace(" ", " " if ascii_only else "\u00a0")  # lines break between states
            legend.append(label, _style(state)).append("  ")
        legend.rstrip()
        return legend

    # --- notebooks ----------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        """A self-contained fragment: no script, no style sheet."""
        text = "".join(_html_cell(cell) for cell in self.cells)
        legend = " ".join(
            _span(state, (MASK_GLYPH + " " if state == "mask" else "") + look.label) for state, look in STATES.items()
        )
        title = f"<div><b>{html.escape(self.title)}</b></div>" if self.title else ""
        facts = self._html_facts()
        beside = f'<div style="flex:0 0 14em;padding-left:1em">{facts}</div>' if facts else ""
        return (
            '<div style="font-family:monospace;line-height:1.5;max-width:72em">'
            f'{title}<div style="display:flex;flex-wrap:wrap"><pre style="flex:1 1 24em;white-space:pre-wrap;'
            f'overflow-wrap:anywhere;margin:0;border:1px solid #8A8A8A;padding:.5em">{text}</pre>{beside}</div>'
            f'<div style="padding-top:.5em">{legend}</div></div>'
        )

    def _html_facts(self) -> str:
        rows = self.progress.rows() if self.progress else []
        gauge = ""
        if self.memory is not None:
            rows += [("plan", self.memory.phase), ("peak", format_bytes(self.memory.peak_bytes)),
                     ("budget", format_bytes(self.memory.budget_bytes))]  # fmt: skip
            share = f"{self.memory.share:.1%}"
            gauge = (
                f'<div style="border:1px solid #8A8A8A;height:.8em" title="{share}"><div style="background:'
                f'{COLORS["hidden"]};height:100%;width:{share};min-width:1px"></div></div>{share}'
            )
        return "".join(f"<div>{html.escape(label)}: {html.escape(value)}</div>" for label, value in rows) + gauge


def _style(state: CellState) -> str:
    look = STATES[state]
    return " ".join(part for part in (look.style, look.color) if part)


def _html_cell(cell: Cell) -> str:
    if cell.state == "mask":
        return _span("mask", MASK_GLYPH)
    text = printable(cell.text)
    if cell.state == "earlier":
        return html.escape(text)
    note = "" if cell.confidence is None else f"confidence {cell.confidence:.3f}"
    return _span(cell.state, text.replace("\n", f"{_NEWLINE}\n"), note)


def _span(state: CellState, text: str, note: str = "") -> str:
    look = STATES[state]
    colors = f"background:{look.color};color:{ink_on(look.color)}" if look.color and state != "mask" else ""
    style = ";".join(part for part in (colors, look.css) if part)
    return (
        f'<span class="{state}"'
        + (f' style="{style}"' if style else "")
        + (f' title="{html.escape(note)}"' if note else "")
        + f">{html.escape(text)}</span>"
    )


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """Return a horizontal gauge; a share above zero always shows, and only a full one is full.

    >>> bar(0.25, 8, ascii_only=True)
    '##......'
    """
    filled = round(share * width)
    if 0 < share < 1:
        filled = max(1, min(filled, width - 1))
    full, empty = ("#", ".") if ascii_only else ("█", "·")
    return full * filled + empty * (width - filled)


def printable(text: str) -> str:
    r"""Return the text with control characters, except newlines and tabs, made visible: no token drives a terminal.

    >>> printable("a\x1b[2Jb\n")
    'a␛[2Jb\n'
    """
    return text.replace("\r\n", "\n").translate(_VISIBLE)


_VISIBLE: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}, 0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}  # fmt: skip
"""C0 controls to their pictures, C1 to the replacement character."""


class CanvasTracker:
    """Follows a generation commit by commit and draws its canvas at any moment.

    Tokens committed since the last canvas are shown by confidence, the others as earlier.

    Parameters
    ----------
    length
        Positions to be generated.
    texts
        Returns the text that each of a run of token ids adds, one string per id.
    first
        Position of the canvas's first token in the sequence, the length of the prompt: for `take`.

    Examples
    --------
    >>> tracker = CanvasTracker(3, lambda ids: [chr(97 + i) for i in ids])
    >>> tracker.commit([0, 2], [7, 9], [0.3, 0.95])
    >>> [cell.state for cell in tracker.canvas().cells]
    ['low', 'mask', 'high']
    """

    def __init__(
        self, length: int, texts: Callable[[Sequence[int]], Sequence[str]], *, title: str = "", first: int = 0
    ) -> None:
        self.title, self._texts, self._first = title, texts, first
        self._progress: Progress | None = None
        self._memory: Memory | None = None
        self._ids: list[int | None] = [None] * length
        self._confidences: list[float | None] = [None] * length
        self._fresh: set[int] = set()
        self._known: dict[tuple[int, ...], Sequence[str]] = {}

    def commit(self, positions: Sequence[int], token_ids: Sequence[int], confidences: Sequence[float]) -> None:
        """Write tokens at positions counted from the first generated one; written tokens may be replaced.

        Raises
        ------
        UsageError
            If a position is not on the canvas, or the three lengths differ.
        """
        if not len(positions) == len(token_ids) == len(confidences):
            raise UsageError(
                f"a commit of {len(positions)} positions has {len(token_ids)} tokens and {len(confidences)} confidences."
            )
        for position, token, confidence in zip(positions, token_ids, confidences, strict=True):
            if not 0 <= position < len(self._ids):
                raise UsageError(f"position {position} is not on a canvas of {len(self._ids)} positions.")
            self._ids[position], self._confidences[position] = token, confidence
            self._fresh.add(position)

    def take(self, step: Any) -> None:
        """Follow a `mosaic.decoding.Step`: `model.generate(…, on_step=tracker.take)`.

        Tokens beyond the canvas are left out: models that attend by blocks also fill the rest of the last block.
        """
        columns = step.positions.tolist(), step.token_ids.tolist(), step.confidence.tolist()
        for position, token, score in zip(*columns, strict=True):
            at = position - self._first
            if 0 <= at < len(self._ids):
                # a negative score is a negative entropy; its exponential is one over the number of likely tokens
                self.commit([at], [token], [score if score >= 0 else math.exp(score)])
        self._progress = Progress(step=step.step, block=step.block + 1, masked=step.masked)
        self._memory = Memory(
            phase=step.phase.replace("_", " "), peak_bytes=step.peak_bytes, budget_bytes=step.plan.budget_bytes
        )

    def canvas(
        self, *, steps: int = 0, blocks: int = 0, tokens_per_second: float = 0.0, max_lines: int | None = None
    ) -> CanvasPicture:
        """Return the canvas now; its new tokens are `earlier` ones for the next canvas.

        `steps` and `blocks` are the expected totals; 0: unknown. `max_lines` as in `CanvasPicture`.
        """
        cells, progress = self._cells(), self._progress
        self._fresh.clear()
        if progress is not None:
            progress = replace(progress, steps=steps, blocks=blocks, tokens_per_second=tokens_per_second)
        return CanvasPicture(cells=cells, title=self.title, progress=progress, memory=self._memory, max_lines=max_lines)

    def _cells(self) -> list[Cell]:
        cells = [Cell()] * len(self._ids)
        known: dict[tuple[int, ...], Sequence[str]] = {}
        for start, run in self._runs():
            known[run] = texts = self._known.get(run) or self._texts(run)
            for position, text in enumerate(texts, start):
                cells[position] = Cell(
                    state=self._state(position), text=text, confidence=self._confidences[position]
                )  # fmt: skip
        self._known = known
        return cells

    def _runs(self) -> list[tuple[int, tuple[int, ...]]]:
        """Runs of tokens without a mask between them, with their starts: a character may span several tokens."""
        runs: list[tuple[int, tuple[int, ...]]] = []
        start, run = 0, list[int]()
        for position, token in enumerate([*self._ids, None]):
            if token is not None:
                start = start if run else position
                run.append(token)
            elif run:
                runs.append((start, tuple(run)))
                run = []
        return runs

    def _state(self, position: int) -> CellState:
        if position not in self._fresh:
            return "earlier"
        confidence = self._confidences[position]
        if confidence is None or not confidence >= LOW:  # NaN is low
            return "low"
        return "high" if confidence >= HIGH else "medium"
