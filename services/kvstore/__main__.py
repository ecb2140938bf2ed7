"""`python -m services.kvstore --bind HOST:PORT --redis-url URL`: one KV store process; see shared/process.py."""

from __future__ import annotations

import sys

from shared.garbage import uncollected

if __name__ == "__main__":
    with uncollected():
        from services.kvstore.server import start
        from services.kvstore.settings import KVStoreSettings
        from shared.process import run_service
    sys.exit(run_service("tandem-kvstore", KVStoreSettings, start))
