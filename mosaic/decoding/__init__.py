"""Decoding algorithms of diffusion language models: policy only. Every buffer is planned and belongs to the model.

`generate` decodes prompts on a compiled model; `shapes` gives the largest steps that this takes.
"""

from __future__ import annotations

from mosaic.decoding.algorithm import Algorithm
from mosaic.decoding.algorithms import shapes
from mosaic.decoding.canvas import Canvas
from mosaic.decoding.config import ALGORITHMS, GenerationConfig, Traits, resolve
from mosaic.decoding.live import Generation, LiveRequest, Submission
from mosaic.decoding.loop import generate
from mosaic.decoding.noise import row_keys
from mosaic.decoding.prompts import Prompt
from mosaic.decoding.session import Session
from mosaic.decoding.stream import Outcome, Stream
from mosaic.decoding.streaming import DraftStreamer, OnStep, Step, Streamer
from mosaic.decoding.text import TextStreamer
from mosaic.decoding.tokenizer import Tokenizer

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Canvas",
    "DraftStreamer",
    "Generation",
    "GenerationConfig",
    "LiveRequest",
    "OnStep",
    "Outcome",
    "Prompt",
    "Session",
    "Step",
    "Stream",
    "Streamer",
    "Submission",
    "TextStreamer",
    "Tokenizer",
    "Traits",
    "generate",
    "resolve",
    "row_keys",
    "shapes",
]
