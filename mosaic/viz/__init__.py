"""Pictures, reports and traces of plans. Everything reads a plan document; nothing here plans.

>>> import mosaic.viz                                # imports neither torch nor matplotlib
>>> mosaic.viz.save(document, "plan.html")           # doctest: +SKIP
"""

from __future__ import annotations

from mosaic.viz.canvas_picture import CanvasPicture, CanvasTracker
from mosaic.viz.charts import before_after_figure, figure_png, plan_figure, plan_png
from mosaic.viz.graph_picture import graph_figure, graph_png
from mosaic.viz.perfetto import trace_events, trace_json
from mosaic.viz.profile import CATEGORIES, Document, LiveBuffer, LiveProfile, largest_live, live_profile
from mosaic.viz.report import html_report
from mosaic.viz.save import FORMATS, save
from mosaic.viz.snapshot import memory_snapshot, snapshot_pickle
from mosaic.viz.text import sparkline, text_timeline

__all__ = [
    "CATEGORIES",
    "FORMATS",
    "CanvasPicture",
    "CanvasTracker",
    "Document",
    "LiveBuffer",
    "LiveProfile",
    "before_after_figure",
    "figure_png",
    "graph_figure",
    "graph_png",
    "html_report",
    "largest_live",
    "live_profile",
    "memory_snapshot",
    "plan_figure",
    "plan_png",
    "save",
    "snapshot_pickle",
    "sparkline",
    "text_timeline",
    "trace_events",
    "trace_json",
]
