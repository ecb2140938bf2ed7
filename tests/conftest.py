"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# How long an example takes says more about the machine's other work than about the code; pytest's timeout is the limit.
settings.register_profile("tandem", deadline=None)
# A build server judges the change, not the luck of a draw; everywhere else each run draws new examples.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "tandem")
