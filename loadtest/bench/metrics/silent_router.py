"""`python -m loadtest.bench.metrics.silent_router`: the router, with recording switched off."""

from __future__ import annotations

import sys

from loadtest.bench.metrics.silent import silence_router
from services.router.service import start
from services.router.settings import RouterSettings
from shared.process import run_service

if __name__ == "__main__":
    silence_router()
    sys.exit(run_service("tandem-router", RouterSettings, start))
