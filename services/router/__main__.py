"""`python -m services.router`: one router replica."""

from __future__ import annotations

import sys

from shared.garbage import uncollected

if __name__ == "__main__":
    with uncollected():
        from services.router.service import start
        from services.router.settings import RouterSettings
        from shared.process import run_service
    sys.exit(run_service("tandem-router", RouterSettings, start))
