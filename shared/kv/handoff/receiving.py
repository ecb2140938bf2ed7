"""A batch of blocks as its receiver sees it: receives posted, then the trailer, which lists what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from shared.errors import TransferFailed
from shared.kv.handoff.trailer import decode_trailer
from shared.kv.seal import Seal
from shared.kv.transfer import Incoming, KVTransfer
from shared.rpc.pb.tandem.v1 import types_pb2


class MemoryLost(TransferFailed):
    """A silent sender may still write to the blocks: they must not be used again before `Incoming.closed` returns."""


class LostMemory:
    """Memory that silent senders may still write to, until they cannot; then it is given back. For one event loop."""

    def __init__(self) -> None:
        self._kept: set[asyncio.Task[None]] = set()

    def keep(self, closed: Coroutine[None, None, None], give_back: Callable[[], None]) -> None:
        """After MemoryLost. `closed` returns when the sender cannot write any more, as `Incoming.closed` does, also at
        the transfer's `close`. Then `give_back` is called, once."""

        async def wait() -> None:
            await closed
            give_back()

        task = asyncio.create_task(wait())
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    @property
    def num_kept(self) -> int:
        """Of these, how many have not been given back yet."""
        return len(self._kept)


async def receive_trailer(
    transfer: KVTransfer, ticket: int, incoming: Incoming, timeout_s: float, seal: Seal | None = None
) -> types_pb2.HandoffTrailer:
    """Waits for the trailer and for every block it names, which a `seal` has not opened yet.

    However this ends, also by an exception or a cancel of the task, no receive of the ticket can write to its memory
    any more when it does, unless it raises MemoryLost. Raises TransferFailed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            trailer = decode_trailer(await incoming.trailer(), seal)
            await incoming.blocks(list(trailer.block_indexes))
        return trailer
    except TimeoutError as error:
        raise TransferFailed(f"the hand-off did not end within {timeout_s:g} s", limit=timeout_s) from error
    finally:
        await end_receives(transfer, ticket)


async def end_receives(transfer: KVTransfer, ticket: int) -> None:
    """When this ends, also by a cancel of the task, no receive of the ticket can write any more.

    Raises MemoryLost where that is impossible, also in place of a cancel: the memory's owner needs it.
    """
    ending, cancelled = asyncio.ensure_future(transfer.cancel(ticket)), None
    while not ending.done():
        try:
            await asyncio.wait((ending,))
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        ending.result()
    except TransferFailed as error:
        raise MemoryLost(error.message) from error
    if cancelled is not None:
        raise cancelled
