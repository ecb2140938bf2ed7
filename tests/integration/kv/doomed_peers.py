"""Makes processes that exchange blocks until they are killed: a program for tests.

For each JSON line {"address", "outward", "inward", "sizes"} on stdin it forks one, which is up much sooner than a new
interpreter. That one expects blocks under the ticket `inward`, says {"pid", "address"} on stdout, and once the first of
them has come, sends blocks under each ticket of `outward` to `address` (hex).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import uvloop

from shared.kv.ucx import UcxTransfer
from tests.integration.kv.far_side import FarSide


async def _exchange(command: dict[str, Any]) -> None:
    transfer = UcxTransfer()
    await transfer.start()
    side = FarSide(transfer)
    await side.expect(command["inward"], command["sizes"])
    print(json.dumps({"pid": os.getpid(), "address": transfer.address.hex()}), flush=True)
    await side.blocks(command["inward"], [command["sizes"][0][0]])
    await asyncio.gather(*(side.send(command["address"], ticket, command["sizes"]) for ticket in command["outward"]))
    await asyncio.Event().wait()


def main() -> None:
    """Until stdin ends."""
    from ucxx._lib import arr, libucxx  # noqa: F401 - what takes long; each process opens UCX for itself

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need nobody who waits for them
    while line := sys.stdin.readline():
        if os.fork() == 0:
            uvloop.run(_exchange(json.loads(line)))


if __name__ == "__main__":
    main()
