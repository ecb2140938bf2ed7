"""Moves a batch of blocks, over the transfer plane that workers use."""

from __future__ import annotations

import asyncio

from services.preflight.peer.wire import BLOCK_BYTES, MAX_COUNT, STEP_TIMEOUT_S
from shared.errors import TransferFailed
from shared.kv.transfer import Incoming, KVTransfer

_NO_TRAILER = 8
"""Bytes of the trailer that every hand-off expects; none is sent here."""


class BlockBatch:
    """Memory of MAX_COUNT blocks, sent from or received into."""

    def __init__(self, transfer: KVTransfer) -> None:
        """Does not own the transfer."""
        self._transfer = transfer
        self._memory = memoryview(bytearray(MAX_COUNT * BLOCK_BYTES))

    def expect(self, ticket: int, count: int) -> Incoming:
        """Posts the receives; `finish` ends them."""
        blocks = [(index, self._block(index)) for index in range(count)]
        return self._transfer.expect(ticket, blocks, _NO_TRAILER)

    async def finish(self, incoming: Incoming, ticket: int, count: int) -> None:
        """Returns when all blocks have arrived. Raises TransferFailed."""
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await incoming.blocks(range(count))
        except TimeoutError as error:
            raise TransferFailed(f"{count} blocks did not arrive within {STEP_TIMEOUT_S:g} s") from error
        finally:
            await self._transfer.cancel(ticket)

    async def send(self, address: bytes, ticket: int, count: int) -> None:
        """Returns when all blocks have been taken. Raises TransferFailed."""
        sends = [
            asyncio.ensure_future(self._transfer.send(address, ticket, index, self._block(index)))
            for index in range(count)
        ]
        _, pending = await asyncio.wait(sends, timeout=STEP_TIMEOUT_S)
        if pending:
            self._transfer.drop_peer(address)  # a send must not be cancelled: this ends it
        results = await asyncio.gather(*sends, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if pending:
            raise TransferFailed(f"{count} blocks were not taken within {STEP_TIMEOUT_S:g} s")

    def _block(self, index: int) -> memoryview:
        return self._memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
