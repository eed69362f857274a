"""Offline jobs: many prompts, in the manner of vLLM's `LLM`, or from a file into a file."""

from __future__ import annotations

from mosaic.jobs.llm import LLM, RequestOutput
from mosaic.jobs.sampling import CompletionOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
