"""`python -m services.worker`: one worker that prefills and decodes."""

from __future__ import annotations

import sys

from shared.garbage import uncollected
from shared.openmp import wait_briefly

if __name__ == "__main__":
    wait_briefly()
    with uncollected():
        from services.decode.role import DecodeRole
        from services.prefill.role import PrefillRole
        from services.worker.service import run_worker
        from shared.identity import WorkerRole
    sys.exit(run_worker({WorkerRole.PREFILL: PrefillRole, WorkerRole.DECODE: DecodeRole}))
