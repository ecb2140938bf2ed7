"""`python -m tests.e2e.damaging services.kvstore …`: that service, but every fifth block that it sends over UCX leaves
with a bit flipped, as broken memory or a broken cable would do it."""

from __future__ import annotations

import itertools
import runpy
import sys
from collections.abc import Sequence

from shared.kv.transfer import TRAILER_INDEX
from shared.kv.ucx.transfer import UcxTransfer

_sound = UcxTransfer.send
_count = itertools.count(1)


def damaging(command: Sequence[str]) -> list[str]:
    """A command of `python -m module …` as one of this module."""
    return [*command[:2], "tests.e2e.damaging", *command[2:]]


async def _damaged(self: UcxTransfer, address: bytes, ticket: int, index: int, memory: memoryview) -> None:
    if index != TRAILER_INDEX and next(_count) % 5 == 0:
        memory = memoryview(bytearray(memory))
        memory[len(memory) // 3] ^= 8
    await _sound(self, address, ticket, index, memory)


if __name__ == "__main__":
    UcxTransfer.send = _damaged  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
