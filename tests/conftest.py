"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# Test processes share the cores out (`make test`); torch in each would take them all and wait for its own threads.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _cores = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores)))

# How long an example takes says more about the machine's other work than about the code; pytest's timeout is the limit.
settings.register_profile("tandem", deadline=None)
# A build server judges the change, not the luck of a draw; everywhere else each run draws new examples.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "tandem")
