"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# A build server judges the change, not the luck of a draw; everywhere else each run draws new examples.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
