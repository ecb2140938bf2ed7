"""The demo model."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).parents[1] / "models" / "demo"
