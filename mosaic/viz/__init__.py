"""Pictures, reports and traces of plans. No planning logic; everything reads a plan document."""

from __future__ import annotations

from mosaic.viz.profile import CATEGORIES, LiveBuffer, LiveProfile, largest_live, live_profile

__all__ = ["CATEGORIES", "LiveBuffer", "LiveProfile", "largest_live", "live_profile"]
