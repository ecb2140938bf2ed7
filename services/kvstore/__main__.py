"""`python -m services.kvstore --bind HOST:PORT --redis-url URL`: one KV store process; see shared/process.py."""

from __future__ import annotations

import sys

from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings
from shared.process import run_service


async def _start(settings: KVStoreSettings) -> KVStoreServer:
    server = KVStoreServer(settings)
    await server.start()
    return server


if __name__ == "__main__":
    sys.exit(run_service("tandem-kvstore", KVStoreSettings, _start))
