"""`python -m tests.e2e.damaging_prefill`: a prefill worker that sends every fifth block that others fetch with a bit
flipped, as broken memory or a broken cable would."""

from __future__ import annotations

import itertools
import sys

from services.prefill.__main__ import start
from services.worker.block_server import BlockServer
from shared.process import run_service

_sound = BlockServer.memory
_count = itertools.count(1)


def _damaged(self: BlockServer, block_id: int) -> memoryview:
    block = _sound(self, block_id)
    if next(_count) % 5:
        return block
    flipped = bytearray(block)
    flipped[len(flipped) // 3] ^= 8
    return memoryview(flipped)


if __name__ == "__main__":
    BlockServer.memory = _damaged  # type: ignore[method-assign]
    sys.exit(run_service(start))
