"""A server that speaks OpenAI's protocol: HTTP in one process, the engine in another."""

from mosaic.serving.engine import EngineOptions
from mosaic.serving.supervisor import Limits, Supervisor

__all__ = ["EngineOptions", "Limits", "Supervisor"]
