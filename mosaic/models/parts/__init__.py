"""The parts of phases, one kind a file; a part of your own is a subclass of one of them."""

from mosaic.models.parts.cache import KEPT, KV, MIXED, WHOLE, CachePolicy
from mosaic.models.parts.commit import Commit, CommitRule, Rule, Score
from mosaic.models.parts.cut import Cut, KeptRows
from mosaic.models.parts.guidance import GUIDED, Guidance
from mosaic.models.parts.heads import EACH, NO_HEAD, NUCLEUS, SAMPLE, STATISTICS, Head
from mosaic.models.parts.logits import LOGITS, ReturnedLogits
from mosaic.models.parts.part import Part
from mosaic.models.parts.table import CANVAS, HELD_EXTENTS, REQUESTS, TABLED, Tabled
from mosaic.models.parts.windows import APART, Apart, Windows

__all__ = [
    "APART",
    "CANVAS",
    "EACH",
    "GUIDED",
    "HELD_EXTENTS",
    "KEPT",
    "KV",
    "LOGITS",
    "MIXED",
    "NO_HEAD",
    "NUCLEUS",
    "REQUESTS",
    "SAMPLE",
    "STATISTICS",
    "TABLED",
    "WHOLE",
    "Apart",
    "CachePolicy",
    "Commit",
    "CommitRule",
    "Cut",
    "Guidance",
    "Head",
    "KeptRows",
    "Part",
    "ReturnedLogits",
    "Rule",
    "Score",
    "Tabled",
    "Windows",
]
