"""`mosaic generate`: the canvas, streaming text, and the command from prompt to exit code, on a fake model."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import mosaic
import mosaic.decoding.loop
import mosaic.runtime.compile
from mosaic import cli
from mosaic.cli.live import LiveView, Record
from mosaic.cli.output import results
from mosaic.decoding.algorithms import shapes
from mosaic.decoding.streaming import Step
from mosaic.decoding.text import Detokenizer, TextStreamer, token_texts
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import CheckpointError, DoesNotFit, UsageError
from mosaic.models import load, shipped
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.steps import StepResult
from mosaic.viz.canvas_picture import STATES, CanvasPicture, CanvasTracker, Cell, Memory, Progress, bar, printable

MIB = 1 << 20
MASK = 258
CONFIG = {
    "model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48, "embedding_size": 264,
    "vocab_size": 264, "mask_token_id": MASK, "torch_dtype": "float32",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}"
)


def byte_symbols() -> list[str]:
    """The byte-level alphabet of the `tokenizers` package, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return written_checkpoint(tmp_path)


def written_checkpoint(tmp_path: Path) -> Path:
    """A directory with config.json and a tokenizer whose ids are the bytes of UTF-8; 256 is the end, 258 the mask."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("[EOS]", "<|user|>", "[MASK]", "<|answer|>")])
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "[EOS]"}))
    return directory


# --- the canvas -------------------------------------------------------------------------------------------------------

CANVAS = CanvasPicture(
    cells=[
        Cell(state="earlier", text="Once upon a time\n"), Cell(state="low", text=" she", confidence=0.2),
        Cell(state="medium", text=" saw", confidence=0.6), Cell(state="high", text=" 東京\n", confidence=0.97), *[Cell()] * 70,
    ],
    title="small-llada", progress=Progress(step=12, steps=128, block=1, blocks=4, masked=70, tokens_per_second=38.25),
    memory=Memory(phase="denoise", peak_bytes=24 * MIB, budget_bytes=96 * MIB),
)  # fmt: skip


def rendered(canvas: CanvasPicture, width: int = 80, **options: Any) -> str:
    console = Console(
        record=True, force_terminal=True, width=width, file=io.StringIO(), color_system="truecolor", **options
    )
    console.print(canvas)
    return console.export_text(styles=True)


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


@pytest.mark.parametrize("width", [20, 40, 63, 64, 80, 132])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(cell_len(line) for line in plain(rendered(CANVAS, width))) <= width


def test_the_canvas_shows_text_counters_memory_and_legend() -> None:
    text = "\n".join(plain(rendered(CANVAS))).replace("\u00a0", " ")
    for part in ("small-llada", "12 of 128", "1 of 4", "70", "38.2", "denoise", "24.00 MiB", "96.00 MiB", "25.0%", "█████·",
                 "Once upon a time", " she saw 東京↵", "░ mask", "low, below 0.5", "high, from 0.9", "earlier"):  # fmt: skip
        assert part in text, part
    assert sum(line.count("░") for line in plain(rendered(CANVAS))) == 70 + 1  # and the legend's


def codes(text: str, word: str) -> set[str]:
    """The SGR codes in force where a word is written."""
    found = re.search(rf"\x1b\[([0-9;]*)m[^\x1b]*{word}", text)
    return set(found[1].split(";")) if found else set()


def test_every_state_has_a_cue_besides_its_colour() -> None:
    text = rendered(CANVAS)
    cues = [frozenset(codes(text, word) & {"1", "2", "3", "4"}) for word in (" she", " saw", "東京", "░░░", "Once")]
    assert len(set(cues)) == 5, cues
    without_color = io.StringIO()
    Console(force_terminal=True, width=80, file=without_color, no_color=True).print(CANVAS)
    left = without_color.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-8]", left)
    assert [codes(left, word) for word in (" she", " saw", "東京")] == [{"3", "4"}, {"4"}, {"1"}]


def test_an_ascii_terminal_gets_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=stream, width=80, force_terminal=True, color_system=None).print(CANVAS)
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "_ mask" in text and "#####." in text and "??\\n" in text


def test_a_long_canvas_shows_the_lines_around_the_first_mask() -> None:
    cells = [Cell(state="earlier", text=f"line {n}\n") for n in range(50)] + [Cell()] * 3
    cells[30:31] = [Cell()]
    text = "\n".join(plain(rendered(CanvasPicture(cells=cells, max_lines=8))))
    assert "line 29" in text and "line 33" in text and "line 20" not in text and "line 40" not in text
    assert "lines 27 to 34 of" in text
    full = "\n".join(plain(rendered(CanvasPicture(cells=cells))))
    assert "line 0" in full and "line 49" in full and " of " not in full


def test_tokens_cannot_drive_the_terminal() -> None:
    canvas = CanvasPicture(cells=[Cell(state="high", text="a\x1b[2J\x07\x9b[bold]")])
    shown = "\n".join(plain(rendered(canvas)))
    assert "\x1b" not in shown and "\x07" not in shown and "\x9b" not in shown and "a␛[2J␇�[bold]" in shown
    assert printable("tab\tline\n") == "tab\tline\n" and "\x1b" not in canvas._repr_html_()


def test_html_is_self_contained_escaped_and_cued() -> None:
    canvas = CanvasPicture(cells=[Cell(state="low", text="<b>&", confidence=0.25), Cell(), Cell(state="earlier", text="x")],
                    title="<m>", memory=CANVAS.memory, progress=CANVAS.progress)  # fmt: skip
    html = canvas._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "<b>&amp;" not in html and "&lt;m&gt;" in html and "confidence 0.250" in html
    assert "text-decoration:underline dotted" in html and "░" in html and "24.00 MiB" in html and "width:25.0%" in html
    assert not re.search(r"<script|<link|https?:|url\(", html)
    assert html.count("<div") == html.count("</div>") and html.count("<span") == html.count("</span>")
    for look in STATES.values():
        assert look.label in html


def test_str_is_the_plain_text() -> None:
    assert str(CANVAS).startswith("Once upon a time\n she saw 東京\n░░░") and CANVAS.plain(ascii_only=True).endswith(
        "___"
    )


def test_a_share_above_zero_is_seen_and_only_full_is_full() -> None:
    assert [bar(x, 10).count("█") for x in (0.0, 1e-6, 0.5, 0.999, 1.0)] == [0, 1, 5, 9, 10]
    assert Memory(phase="", peak_bytes=5, budget_bytes=0).share == 1.0


def test_the_tracker_shows_by_confidence_what_came_since_the_last_canvas() -> None:
    tracker = CanvasTracker(5, lambda ids: [chr(97 + i) for i in ids])
    tracker.commit([0, 1, 2], [0, 1, 2], [0.95, 0.5, 0.49])
    tracker.commit([4], [4], [float("nan")])
    assert [c.state for c in tracker.canvas().cells] == ["high", "medium", "low", "mask", "low"]
    tracker.commit([1], [25], [0.9])  # replaced
    canvas = tracker.canvas()
    assert [c.state for c in canvas.cells] == ["earlier", "high", "earlier", "mask", "earlier"] and str(
        canvas
    ) == "azc░e"
    with pytest.raises(UsageError, match="not on a canvas of 5"):
        tracker.commit([5], [0], [1.0])
    with pytest.raises(UsageError, match="2 positions has 1 tokens"):
        tracker.commit([0, 1], [0], [1.0])


def test_a_notebook_follows_the_loop_with_the_tracker_alone() -> None:
    tracker = CanvasTracker(3, lambda ids: [chr(i) for i in ids], first=10)
    assert tracker.canvas().progress is None
    tracker.take(a_step(4, 1, [10, 12, 13], [65, 66, 67], [0.95, math.log(0.6), 0.1]))
    canvas = tracker.canvas(steps=8)
    assert str(canvas) == "A░B" and [cell.state for cell in canvas.cells] == ["high", "mask", "medium"]
    assert canvas.progress == Progress(step=4, steps=8, block=1, masked=1)
    assert canvas.memory == Memory(phase="full step", peak_bytes=20 * MIB, budget_bytes=80 * MIB)
    assert "4 of 8" in canvas._repr_html_()


# --- streaming --------------------------------------------------------------------------------------------------------


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(max_size=40))
def test_characters_are_never_split(text: str) -> None:
    pieces = token_texts(decode_bytes, list(text.encode("utf-8", "surrogatepass" if text.isascii() else "replace")))
    assert "".join(pieces) == text.encode("utf-8", "replace").decode() and all(
        "\ufffd" not in p for p in pieces if "\ufffd" not in text
    )


@given(st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=9))
def test_whatever_the_bytes_the_pieces_are_the_whole(groups: list[list[int]]) -> None:
    ids, detokenizer = list(chain(*groups)), Detokenizer(decode_bytes)
    assert "".join(token_texts(decode_bytes, ids)) == decode_bytes(ids)
    assert "".join(detokenizer.push(*group) for group in groups) + detokenizer.flush() == decode_bytes(ids)


def test_the_window_that_is_decoded_stays_short() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode_bytes(ids)

    data = list(("日本語 text " * 200).encode())
    token_texts(decode, data)
    assert max(lengths) <= 6  # two characters of three bytes
    lengths.clear()
    detokenizer = Detokenizer(decode)
    for begin in range(0, len(data), 32):
        detokenizer.push(*data[begin : begin + 32])
    assert len(lengths) <= len(data) // 16 + 1 and sum(lengths) <= 6 * len(data)


def test_spaces_that_a_decoder_drops_at_the_beginning_are_kept_inside() -> None:
    words = ["▁Once", "▁upon", "▁a"]

    def decode(ids: list[int]) -> str:  # as sentencepiece does
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert token_texts(decode, [0, 1, 2]) == ["Once", " upon", " a"]


def test_text_streamer_writes_as_it_comes(checkpoint: Path) -> None:
    out = io.StringIO()
    streamer = TextStreamer(Tokenizer(checkpoint), out)
    data = "né!".encode()
    streamer.put(torch.tensor(list(data[:2])))
    assert out.getvalue() == "n"
    streamer.put([data[2]])
    assert out.getvalue() == "né"
    streamer.put([data[3], 256])
    streamer.put([0xE6])
    streamer.end()
    assert out.getvalue() == "né!�\n"
    answer = TextStreamer(Tokenizer(checkpoint), out, skip_prompt=True)
    for text in (b"prompt", b"answer"):
        answer.put(list(text))
    answer.end()
    assert out.getvalue().endswith("�\nanswer\n") and "prompt" not in out.getvalue()
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    TextStreamer(Tokenizer(checkpoint), narrow).put(list("é".encode()))
    assert narrow.buffer.getvalue() == b"?"  # type: ignore[attr-defined]


def test_detokenizer_begins_anew_after_a_flush() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert detokenizer.push(0xC3) == "" and detokenizer.flush() == "�" and detokenizer.flush() == ""
    assert detokenizer.push(65) == "A"


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_text_that_is_submitted_is_text_that_is_generated_from(checkpoint: Path) -> None:
    with mosaic.compile(CONFIG) as random:
        random.save(checkpoint)
    prompts: list[Any] = ["Grüße", [{"role": "user", "content": "hi"}], torch.tensor([65, 66])]
    with mosaic.compile(checkpoint, device="cpu", host_budget=0) as model, model.session() as session:
        expected = model.generate(prompts, gen_length=16)
        requests = [session.submit(prompt, gen_length=16) for prompt in prompts]
        assert session.admits(mosaic.Submission(prompt="Grüße"))
        while session.live:
            session.advance()
    for request, one in zip(requests, expected, strict=True):
        found = request.generation
        assert found is not None and found.text == one.text and torch.equal(found.prompt_ids, one.prompt_ids)
        assert torch.equal(found.token_ids, one.token_ids)
    assert expected[0].text is not None and expected[2].text is None


def test_tokenizer_and_chat(checkpoint: Path) -> None:
    tokenizer = Tokenizer(checkpoint)
    assert tokenizer.decode(tokenizer.encode("Grüße 東京")) == "Grüße 東京"
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [257, *b"hi", 259]
    assert tokenizer.decode([72, 256]) == "H" and tokenizer.decode([72, 256], skip_special_tokens=False) == "H[EOS]"


def test_chat_templates_in_a_file_of_their_own_by_name_and_refusing(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!{{ eos_token }}")
    assert Tokenizer(checkpoint).render_chat([{"role": "user", "content": "hi"}]) == "hi![EOS]"
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('no system turns') }}")
    with pytest.raises(UsageError, match="no system turns"):
        Tokenizer(checkpoint).render_chat([{"role": "user", "content": "hi"}])
    (checkpoint / "chat_template.jinja").unlink()
    named = {"chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "D"}]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    assert Tokenizer(checkpoint).render_chat([]) == "D"
    (checkpoint / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match=r"no chat template.*without --chat"):
        Tokenizer(checkpoint).encode_chat([])


def test_a_broken_tokenizer_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer(checkpoint)


# --- the command ------------------------------------------------------------------------------------------------------


PLAN: Any = SimpleNamespace(total_bytes=20 * MIB, budget_bytes=80 * MIB, predicted_step_ms=1.0)


def a_step(number: int, masked: int, positions: Sequence[int], ids: Sequence[int], scores: Sequence[float]) -> Step:
    return Step(
        request=0, step=number, block=0, phase="full_step", masked=masked, positions=torch.tensor(positions),
        token_ids=torch.tensor(ids), confidence=torch.tensor(scores), plan=PLAN, peak_bytes=20 * MIB, seconds=0.25,
    )  # fmt: skip


class FakeModel:
    """Answers any prompt of at most `limit` tokens, the answer's 128 included, two bytes a step, the last first."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.calls, self.closed = answer, [], False
        self.limit = MIB
        self.architecture = load(CONFIG).architecture

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.closed = True

    def compile(self, model: Any, **options: Any) -> FakeModel:
        self.calls.append({"model": model.name, **options})
        return self

    def admits(self, steps: Any, *, more: Any = None) -> bool:
        return max(step.tokens for step in steps) <= self.limit

    def check(self, steps: Any, *, more: Any = None) -> None:
        if not self.admits(steps):
            raise DoesNotFit("too long", needed_bytes=3 * MIB, available_bytes=2 * MIB)

    def generate(
        self, runner: Any, prompts: Any, config: Any, *, streamer: Any = None, on_step: Any = None
    ) -> list[Any]:
        (prompt,) = prompts
        self.check(shapes(config, [len(prompt)], self.architecture))
        self.calls.append({"prompt": prompt.tolist(), "config": config, "runner": runner})
        first, ids = len(prompt), list(self.answer)
        for number, start in enumerate(reversed(range(0, len(ids), 2))):
            part = ids[start : start + 2]
            places = range(first + start, first + start + len(part))
            on_step(a_step(number + 1, start, places, part, [0.3, 0.95][: len(part)]))
        if streamer is not None:
            streamer.put(prompt)
            streamer.put(torch.tensor(ids))
            streamer.end()
        return [SimpleNamespace(token_ids=torch.tensor(ids), finish="length")]


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    model = FakeModel("Grüße, 東京!\n".encode())
    monkeypatch.setattr(mosaic.runtime.compile, "compile", model.compile)
    monkeypatch.setattr(mosaic.decoding.loop, "generate", model.generate)
    return model


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def run(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["mosaic", "generate", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    results.cache_clear()
    yield run
    results.cache_clear()


def test_a_rotary_scaling_takes_a_prompt_beyond_the_trained_context(run: Any, checkpoint: Path) -> None:
    """The refusal's context fits; with a cache too."""
    with mosaic.compile(CONFIG | {"max_sequence_length": 48}) as model:
        model.save(checkpoint)
    ask = ("--model", str(checkpoint), "--prompt", "a" * 60, "--gen-length", "8", "--json", "--algorithm", "fast-dllm",
           "--block-length", "4", "--cache", "dual")  # fmt: skip
    refused = run(*ask)
    assert (
        refused.code == 2 and 'set rope_scaling in its config.json to {"rope_type": "yarn", "factor": 2}' in refused.err
    )
    for scaling in ("yarn:2", "linear:2", "dynamic:1.5"):
        assert json.loads(run(*ask, "--rope-scaling", scaling).out)["prompt_tokens"] == 60


def test_without_a_terminal_stdout_is_the_text(fake: FakeModel, run: Any, checkpoint: Path) -> None:
    ran = run(
        "--model",
        str(checkpoint),
        "--prompt",
        "hi",
        "--gen-length",
        "32",
        "--seed",
        "7",
        "--budget",
        "1GiB",
        "--threads",
        "1",
    )
    assert ran.code == 0 and ran.out == "Grüße, 東京!\n\n" and fake.closed
    assert re.fullmatch(
        r"mosaic: 17 tokens in \d+\.\d\d s, 9 steps, [\d,.]+ tokens/s; planned peak 20.00 MiB of 80.00 MiB\n", ran.err
    )
    compiled, generated = fake.calls
    assert compiled == {
        "model": "tiny",
        "device": "cpu",
        "budget": "1GiB",
        "host_budget": None,
        "dtype": None,
        "threads": 1,
        "batch_invariant": False,
        "seed": 7,
    }
    assert generated["prompt"] == list(b"hi") and generated["runner"] is fake
    assert generated["config"].gen_length == 32


def test_a_hopeless_run_is_told_before_it_starts(fake: FakeModel, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mosaic.cli.outlook.available_bytes", lambda: 8 << 30)
    ran = run("--model", "llada-8b", "--device", "cpu", "--prompt", "hi", "--gen-length", "128", "--steps", "64")
    noise, memory, time, *_ = ran.err.splitlines()
    assert "the output is noise" in noise
    assert re.search(r"takes 1\d\.\d\d GiB on cpu, and this machine has 8\.00 GiB to give", memory)
    assert re.search(r"up to 64 steps of .* s, .* (min|h).* in all, by an estimated profile; Ctrl-C", time)
    monkeypatch.setattr("mosaic.cli.outlook.available_bytes", lambda: 64 << 30)
    said = run("--model", "llada-8b", "--device", "cpu", "--prompt", "hi", "--gen-length", "1").err
    assert "to give" not in said and "in all" not in said
    assert "in all" not in run("--model", "small", "--prompt", "hi", "--gen-length", "2000").err


def test_prompt_from_stdin_and_chat(fake: FakeModel, run: Any, checkpoint: Path) -> None:
    ran = run("--model", str(checkpoint), "--chat", stdin="¿qué?\n")  # as echo and editors end a text
    assert ran.code == 0 and ran.out == "Grüße, 東京!\n"  # an answer loses the white space around it
    assert fake.calls[-1]["prompt"] == [257, *"¿qué?".encode(), 259]
    assert run("--model", str(checkpoint), "--prompt", "-", stdin="x").code == 0 and fake.calls[-1]["prompt"] == [120]
    broken = run("--model", str(checkpoint), "--prompt", "a\udcff")
    assert broken.code == 2 and "bytes that are no characters" in broken.err and broken.err.count("\n") == 1


def test_json_is_only_json(fake: FakeModel, run: Any, checkpoint: Path) -> None:
    ran = run("--model", str(checkpoint), "--prompt", "hi", "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and ran.err == ""
    assert (
        found["text"] == "Grüße, 東京!\n" and bytes(found["token_ids"]) == fake.answer and found["prompt_tokens"] == 2
    )
    assert len(found["steps"]) == 9 and found["steps"][-1]["masked"] == 0 and found["steps"][0]["committed"] == 1
    assert sum(step["committed"] for step in found["steps"]) == 17
    assert found["peak_bytes"] == 20 * MIB and found["plans"][0]["phase"] == "full_step"
    assert found["timings"]["generate_seconds"] >= 0 and found["config"]["algorithm"] == "llada"


def test_a_preset_prints_token_ids_and_says_so(fake: FakeModel, run: Any) -> None:
    ran = run("--model", "llada-8b", "--prompt", "ab")
    assert ran.code == 0 and ran.out.split() == [str(b) for b in fake.answer]
    assert "random weights and no tokenizer" in ran.err and "token ids are printed" in ran.err
    assert fake.calls[-1]["prompt"] == [97, 98]
    assert json.loads(run("--model", "llada-8b", "--prompt", "ab", "--json").out)["text"] is None


def test_a_long_run_without_a_terminal_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from mosaic.cli.live import Lines

    now = iter(range(0, 100))
    record = Record(clock=lambda: float(next(now)))
    clock = iter([0.0, 4.0, 6.0, 7.0])
    with Lines(record, clock=lambda: next(clock)) as lines:
        for number in range(3):
            step = a_step(number + 1, 10 - number, [number], [65], [1.0])
            record(step)
            lines(step)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "mosaic: step 2, block 1, 9 masked, 1.0 tokens/s, planned 20.00 MiB\n"


def test_the_live_view_draws_at_most_twelve_times_a_second_and_the_end() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24, color_system=None)
    tracker = CanvasTracker(4, lambda ids: [chr(i) for i in ids], title="tiny", first=2)
    clock = iter([0.0, 0.0, 0.01, 0.02, 0.5, 0.5, 0.6])
    record = Record()
    with LiveView(console, tracker, record, steps=5, blocks=1, clock=lambda: next(clock)) as view:
        for number, position in enumerate([2, 3, 4, 9]):  # 9: the rest of the last block, beyond the canvas
            view(a_step(number + 1, 4 - number, [position], [65 + number], [-0.01]))
        view(a_step(5, 0, [5], [90], [0.1]))
    shown = stream.getvalue()
    assert [n for n in range(1, 6) if f"{n} of 5" in shown] == [1, 4, 5] and "ABCZ" in shown
    assert "high" in STATES and "20.00 MiB" in shown and "25.0%" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gen-length", "100", "--block-length", "32"), "gen_length 100 is not divisible by block_length 32; use gen_length 128"),
        (("--gen-length", "64", "--block-length", "32", "--steps", "3"), "steps 3 is not divisible by the 2 blocks"),
        (("--steps", "0"), "steps is 0; it must be at least 1."),
        (("--gen-length", "0"), "gen_length is 0; it must be at least 1."),
        (("--algorithm", "fast-dllm", "--threshold", "0"), "threshold is 0.0; it must be in (0, 1]."),
        (("--algorithm", "fast-dllm", "--threshold", "1.5"), "threshold is 1.5; it must be in (0, 1]."),
        (("--algorithm", "fast-dllm", "--threshold", "nan"), "threshold: expected a number, got nan."),
        (("--algorithm", "fast-dlm"), "unknown algorithm 'fast-dlm'. Did you mean 'fast-dllm'?"),
        (("--algorithm", "sdar"), "the algorithm 'sdar' is not for this model"),
        (("--remasking", "low"), "unknown remasking 'low'"),
        (("--alg", "entropi"), "unknown alg 'entropi'. Did you mean 'entropy'?"),
        (("--cache", "both"), "unknown cache 'both'"),
        (("--temperature", "-1"), "temperature is -1.0; it must be at least 0."),
        (("--prompt", "  "), "the prompt is empty"),
        (("--budget", "many"), "cannot read the size 'many'"),
        (("--device", "rtx3090"), "unknown device 'rtx3090'. Did you mean 'rtx-3090'?"),
        (("--model", "llada-9b"), "unknown model 'llada-9b'. Did you mean 'llada-8b'?"),
        (("--model", "llada-8b", "--chat"), "--chat needs a checkpoint directory"),
        (("--steps", "many"), "Invalid value for '--steps'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    run: Any, checkpoint: Path, arguments: tuple[str, ...], says: str
) -> None:
    given = arguments if "--prompt" in arguments else ("--prompt", "hi", *arguments)
    ran = run(*(given if "--model" in given else ("--model", str(checkpoint), *given)))
    assert ran.code == 2 and ran.out == "" and "Traceback" not in ran.err
    assert says in ran.err and (ran.err.count("\n") == 1 or "Invalid value" in ran.err), ran.err


def test_a_missing_tokenizer_is_one_line_and_exit_code_1(run: Any, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    ran = run("--model", str(checkpoint), "--prompt", "hi")
    assert (
        ran.code == 1
        and ran.out == ""
        and ran.err.count("\n") == 1
        and "has neither tokenizer.json nor vocab.json" in ran.err
    )


@pytest.mark.parametrize(
    ("limit", "says"), [(140, "the longest prompt that fits has 12 tokens"), (100, "no prompt fits")]
)
def test_a_prompt_that_does_not_fit_says_which_would(
    fake: FakeModel, run: Any, checkpoint: Path, limit: int, says: str
) -> None:
    fake.limit = limit
    ran = run("--model", str(checkpoint), "--prompt", "x" * 40)
    assert ran.code == 3 and ran.out == "" and fake.closed and ran.err.count("\n") == 1
    assert f"a prompt of 40 tokens with gen_length 128 needs 3.00 MiB, the budget is 2.00 MiB; {says}." in ran.err


def test_no_prompt_in_a_terminal_is_refused(run: Any, checkpoint: Path) -> None:
    read, write = pty.openpty()
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "mosaic", "generate", "--model", str(checkpoint)], stdin=write, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(read)
        os.close(write)
    assert ran.returncode == 2 and "give a prompt: --prompt" in ran.stderr


def test_shipped_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped("llada-8b") is None
    for name, directory in (("small", "small-llada"), ("small-llada", "small-llada"), ("small-sdar", "small-sdar")):
        assert shipped(name).name == directory  # type: ignore[union-attr]
    monkeypatch.setattr(sys.modules[shipped.__module__], "CHECKPOINTS", tmp_path)
    with pytest.raises(CheckpointError, match="small-llada is missing"):
        shipped("small")


class AnswersBytes(FakeModel):
    """Runs the steps of the real decoding loop: the most confident rows are the first ones of the window."""

    def sharing(self) -> SharedSizes:
        return SharedSizes()

    def exclusive(self) -> Any:
        return nullcontext()

    def open_rows(self, state: Any) -> Any:
        raise AssertionError("a step of the whole canvas keeps no keys and values")

    def admits(self, sizes: Any, *, more: Any = None) -> bool:
        return max(size.tokens for size in sizes) <= self.limit

    def step(self, requests: Any) -> list[StepResult]:
        results = []
        for request in requests:
            positions = request.rows + request.start
            token = torch.tensor([self.answer[int(p) % len(self.answer)] for p in positions])
            score = 1.0 / (1.0 + torch.arange(len(positions)))
            committed = torch.arange(len(positions)) < request.quota
            chosen = torch.where(committed, token, request.current)
            results.append(
                StepResult(token=token, score=score, committed=committed, chosen=chosen, plan=PLAN, seconds=0.5)
            )
        return results


def test_the_real_loop_feeds_text_json_and_totals(run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AnswersBytes("né!Grüße_".encode())
    monkeypatch.setattr(mosaic.runtime.compile, "compile", model.compile)
    options = ("--gen-length", "24", "--block-length", "12", "--steps", "8", "--prompt", "hello worlds")  # 12 bytes
    ran = run("--model", str(checkpoint), *options)
    assert ran.code == 0 and ran.out == "né!Grüße_" * 2 + "\n" and "24 tokens in" in ran.err and " 8 steps" in ran.err
    found = json.loads(run("--model", str(checkpoint), *options, "--json").out)
    assert found["text"] == "né!Grüße_" * 2 and found["prompt_tokens"] == 12 and found["config"]["block_length"] == 12
    assert [step["step"] for step in found["steps"]] == [*range(1, 9)]
    assert [step["masked"] for step in found["steps"]] == [*range(21, -1, -3)]
    assert [step["block"] for step in found["steps"]] == [0] * 4 + [1] * 4
    assert {step["seconds"] for step in found["steps"]} == {0.5}
    spelled = json.loads(run("--model", str(checkpoint), *options[:-1], "a[MASK]b", "--json").out)
    assert spelled["prompt_tokens"] == 8, "text that spells the mask token is text"


# --- terminals, for real ----------------------------------------------------------------------------------------------

IN_TERMINALS = """
import json, os, pty, sys
sys.path.insert(0, {tests!r})
import mosaic.runtime.compile, mosaic.decoding.loop
from test_generate_cli import FakeModel
from mosaic.cli import main

def alone(options, environment):
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 2)
    sys.stdout = open(1, "w", closefd=False)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    os.environ.update({{"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", **environment}})
    fake = FakeModel("Grüße, \\x1b[2J東京!".encode())
    mosaic.runtime.compile.compile, mosaic.decoding.loop.generate = fake.compile, fake.generate
    sys.argv = ["mosaic", "generate", "--model", {model!r}, "--prompt", "hi", *options]
    main()

found = []
for options, environment in json.loads({cases!r}):
    child, terminal = pty.fork()
    if not child:
        code = 1
        try:
            alone(options, environment)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)
    written = b""
    try:
        while part := os.read(terminal, 65536):
            written += part
    except OSError:  # the other end has closed: how Linux reports the end
        pass
    found.append((os.waitpid(child, 0)[1], written.decode()))
print(json.dumps(found))
"""
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "plain": ([], {}),
    "no colour": ([], {"NO_COLOR": "1"}),
    "dumb": ([], {"TERM": "dumb"}),
    "no live": (["--no-live"], {}),
}


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Everything that the command writes to terminals of 80 columns; one process starts, and each case is a fork of it."""
    folder = written_checkpoint(tmp_path_factory.mktemp("terminals"))
    cases = json.dumps(list(CASES.values()))
    code = IN_TERMINALS.format(tests=str(Path(__file__).parent), model=str(folder), cases=cases)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert [status for status, _ in found] == [0] * len(CASES)
    return {name: text.replace("\r\n", "\n") for name, (_, text) in zip(CASES, found, strict=True)}


def test_a_terminal_gets_the_canvas_then_the_text(terminals: dict[str, str]) -> None:
    shown = terminals["plain"]
    assert "░░░" in shown and "tiny, llada" in shown and "budget" in shown and "20.00 MiB" in shown
    assert shown.endswith("Grüße, ␛[2J東京!\n") and "\x1b[2J" not in shown
    assert re.search(r"\x1b\[[\d;]*3\dm", shown), "colours"


def test_without_colour_the_canvas_keeps_its_cues(terminals: dict[str, str]) -> None:
    shown = terminals["no colour"]
    assert "░░░" in shown and shown.endswith("Grüße, ␛[2J東京!\n")
    styles = {int(code) for codes in re.findall(r"\x1b\[([\d;]+)m", shown) for code in codes.split(";")}
    assert styles <= {0, 1, 2, 3, 4}, "bold, dim, italic, underline, and no colour"


def test_a_terminal_that_cannot_be_drawn_in_gets_the_text_alone(terminals: dict[str, str]) -> None:
    assert terminals["dumb"] == "Grüße, ␛[2J東京!\n"


def test_no_live_in_a_terminal_streams_the_text(terminals: dict[str, str]) -> None:
    assert terminals["no live"] == "Grüße, ␛[2J東京!\n"
