"""Requests as a user's own algorithm decodes them: a session has these as generators."""

from __future__ import annotations

from dataclasses import replace

from mosaic.decoding import GenerationConfig, resolve
from mosaic.decoding.algorithms import algorithm_of
from mosaic.models.architecture import Architecture

__all__ = ["as_generator"]


def as_generator(config: GenerationConfig, arch: Architecture) -> GenerationConfig:
    """The same options, of which a table is told nothing."""
    found = resolve(config, arch)
    return replace(found, algorithm=replace(algorithm_of(found), row=None))
