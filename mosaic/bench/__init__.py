"""Load for any server that speaks OpenAI's protocol, and what it does to its callers: `mosaic bench serve`. Needs no torch."""

from mosaic.bench.figures import goal_of, results
from mosaic.bench.processes import measure
from mosaic.bench.traffic import TRAFFIC, Asked, Lengths, Load, asked

__all__ = ["TRAFFIC", "Asked", "Lengths", "Load", "asked", "goal_of", "measure", "results"]
