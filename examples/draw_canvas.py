"""Stop a generation half-way and draw its canvas as a picture: `python examples/draw_canvas.py docs/images/generate.svg`.

Every step reports the tokens it committed and the plan that it ran by; `CanvasTracker` keeps them, and its canvas is what
`mosaic generate` shows in a terminal. Takes seconds on a CPU; needs the extra `torch`.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

import mosaic
from mosaic.decoding import GenerationConfig, Step
from mosaic.decoding.text import token_texts
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.models import load
from mosaic.viz import CanvasTracker

PROMPT = "Write a story about Anna, a red kite and the park."
HALF_WAY = 0.45  # of the masks are left


def main(target: Path) -> None:
    tokenizer = Tokenizer(load("small").path)
    prompt = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    config = GenerationConfig(gen_length=96)
    tracker = CanvasTracker(
        config.gen_length, lambda ids: token_texts(tokenizer.decode, ids), title="small, llada", first=len(prompt)
    )
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    drawn = False

    def draw(step: Step) -> None:
        nonlocal drawn
        tracker.take(step)
        if not drawn and step.masked <= HALF_WAY * config.gen_length:
            console.print(tracker.canvas(steps=config.gen_length, blocks=3))
            drawn = True

    with mosaic.compile("small") as model:
        (answer,) = model.generate(prompt, config, on_step=draw)
    picture = console.export_svg(title="mosaic generate")
    target.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8"
    )  # nothing to fetch
    print(tokenizer.decode(answer.token_ids.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("canvas.svg"))
