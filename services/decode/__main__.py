"""`python -m services.decode`: one decode worker."""

from __future__ import annotations

import sys

from shared.collector import uncollected
from shared.openmp import wait_briefly

if __name__ == "__main__":
    wait_briefly()
    with uncollected():
        from services.decode.servicer import start
        from services.worker.settings import WorkerSettings
        from shared.process import run_service
    sys.exit(run_service("tandem-decode", WorkerSettings, start))
