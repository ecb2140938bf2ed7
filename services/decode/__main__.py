"""`python -m services.decode`: one decode worker."""

from __future__ import annotations

import sys

from shared.garbage import uncollected
from shared.openmp import wait_briefly

if __name__ == "__main__":
    wait_briefly()
    with uncollected():
        from services.decode.role import DecodeRole
        from services.worker.service import run_worker
        from shared.identity import WorkerRole
    sys.exit(run_worker({WorkerRole.DECODE: DecodeRole}))
