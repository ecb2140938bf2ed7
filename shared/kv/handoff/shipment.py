"""One hand-off as its sender sees it: blocks leave while later chunks compute, a trailer closes it.

A note is a message like the trailer, under the same tag and so in order before it; there is one for each batch of
blocks that leaves together, so that notes are as few as engine steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Self

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory, host_bytes
from shared.kv.fleet_key import HandoffSeal
from shared.kv.handoff.arrival_check import AT_ONCE_BYTES
from shared.kv.handoff.outgoing_block import OutgoingBlock
from shared.kv.handoff.trailer import encode_note, encode_trailer
from shared.kv.transfer import TRAILER_INDEX, KVTransfer
from shared.rpc.pb.tandem.v1 import types_pb2

logger = logging.getLogger(__name__)


class Shipment:
    """Sends blocks to one receiver: a sequence's to a decode worker, a batch to a store, a prefix from there.

    Every block given to `add` or `add_noted` is released exactly once, when its memory may be reused. `finish` and
    `abort` end the hand-off with a trailer, one of them, once. As a context manager it aborts where its block is left
    without `finish`.
    """

    def __init__(
        self,
        transfer: KVTransfer,
        address: bytes,
        ticket: int,
        num_needed: int,
        memory: Callable[[int], BlockMemory],
        release: Callable[[OutgoingBlock], None],
        timeout_s: float,
        seal: HandoffSeal | None = None,
    ) -> None:
        """`memory(block_id)` is a block's bytes, `release(block)` gives the sender's reference back. A receiver
        that takes nothing for `timeout_s` after the last chunk is given up. `seal` tags notes, their blocks and the
        trailer."""
        self._transfer = transfer
        self._address = address
        self._ticket = ticket
        self._num_needed = num_needed
        self._memory = memory
        self._release = release
        self._timeout_s = timeout_s
        self._seal = seal
        self._num_messages = 0  # notes and trailer
        self._last_note: asyncio.Event | None = None
        self._sends: list[asyncio.Task[None]] = []
        self._sent: list[OutgoingBlock] = []
        self._error: TransferFailed | None = None
        self._finishing = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._finishing:
            await asyncio.shield(self.abort())

    @property
    def num_blocks(self) -> int:
        """Blocks handed to the transfer so far."""
        return len(self._sent)

    def add(self, block: OutgoingBlock) -> None:
        """Starts sending a block."""
        self._sent.append(block)
        self._sends.append(asyncio.create_task(self._send(block)))

    def add_noted(self, blocks: Sequence[OutgoingBlock]) -> None:
        """Starts sending blocks, and before them one note with their checksums: the receiver, which must take notes,
        can tell at once what has arrived undamaged. Batches leave in their order."""
        before, self._last_note = self._last_note, asyncio.Event()
        self._sent.extend(blocks)
        self._sends.append(asyncio.create_task(self._send_noted(blocks, before, self._last_note)))

    async def sent(self) -> None:
        """Waits until everything given so far was sent. Raises TransferFailed where something did not leave."""
        await self._all_sent()
        if self._error is not None:
            raise self._error

    async def finish(self, first_token: int, num_computed_tokens: int, *, finished: bool) -> None:
        """Waits for every block, then sends the trailer. Raises TransferFailed where something did not leave."""
        self._finishing = True
        await self.sent()
        await self._send_trailer(
            types_pb2.HandoffTrailer(
                first_token=first_token, num_computed_tokens=num_computed_tokens, finished=finished
            )
        )

    async def abort(self) -> None:
        """Tells the receiver that nothing more comes; what was sent already arrives. Errors of a dead peer do not
        matter any more."""
        await self._all_sent()
        if self._error is None:
            try:
                await self._send_trailer(types_pb2.HandoffTrailer(aborted=True))
            except TransferFailed:
                return

    def drop_receiver(self) -> None:
        """The receiver is gone: sends to it fail now instead of waiting for it."""
        self._transfer.drop_peer(self._address)

    async def _all_sent(self) -> None:
        """Returns when every block given to `add` was sent or given up."""
        if self._sends:
            _, stuck = await asyncio.wait(self._sends, timeout=self._timeout_s)
            if stuck:
                self.drop_receiver()
                await asyncio.wait(stuck)

    async def _send(self, block: OutgoingBlock, memory: BlockMemory | None = None) -> None:
        try:
            if self._error is None:
                memory = self._memory(block.block_id) if memory is None else memory
                await self._transfer.send(self._address, self._ticket, block.index, memory)
        except Exception as error:
            self._error = _as_failure(error)
        finally:
            self._release(block)

    async def _send_noted(
        self, blocks: Sequence[OutgoingBlock], before: asyncio.Event | None, left: asyncio.Event
    ) -> None:
        """Sends a batch; `before` is set when the note before has left, `left` when this one has."""
        try:
            memory = [self._memory(block.block_id) for block in blocks]
            tags = await self._tags(blocks, memory)
        except Exception as error:
            self._error = _as_failure(error)
            left.set()
            for block in blocks:
                self._release(block)
            return
        note = types_pb2.HandoffTrailer(
            more=True,
            block_indexes=[block.index for block in blocks],
            checksums=[block.checksum for block in blocks],
            block_tags=tags,
        )
        sends = [asyncio.create_task(self._send_note(note, before, left))]
        sends += [asyncio.create_task(self._send(*pair)) for pair in zip(blocks, memory, strict=True)]
        await asyncio.wait(sends)

    async def _tags(self, blocks: Sequence[OutgoingBlock], memory: Sequence[BlockMemory]) -> list[bytes]:
        if self._seal is None:
            return []
        pairs = [(block.index, host_bytes(place)) for block, place in zip(blocks, memory, strict=True)]
        if sum(place.nbytes for place in memory) <= AT_ONCE_BYTES:
            return self._seal.block_tags(pairs)
        return await asyncio.to_thread(self._seal.block_tags, pairs)

    async def _send_note(
        self, note: types_pb2.HandoffTrailer, before: asyncio.Event | None, left: asyncio.Event
    ) -> None:
        try:
            if before is not None:
                await before.wait()
            if self._error is None:
                data = bytearray(encode_note(note, self._seal, self._next_number()))
                await self._transfer.send(self._address, self._ticket, TRAILER_INDEX, memoryview(data))
        except Exception as error:
            self._error = _as_failure(error)
        finally:
            left.set()

    def _next_number(self) -> int:
        self._num_messages += 1
        return self._num_messages - 1

    async def _send_trailer(self, trailer: types_pb2.HandoffTrailer) -> None:
        trailer.block_indexes.extend(block.index for block in self._sent)
        trailer.checksums.extend(block.checksum for block in self._sent)
        data = bytearray(encode_trailer(trailer, self._num_needed, self._seal, self._next_number()))
        sending = asyncio.create_task(self._transfer.send(self._address, self._ticket, TRAILER_INDEX, memoryview(data)))
        _, stuck = await asyncio.wait((sending,), timeout=self._timeout_s)
        if stuck:
            self.drop_receiver()
        await sending


def _as_failure(error: Exception) -> TransferFailed:
    """What ends the hand-off, also for a bug: the receiver must hear of it, and the blocks go back."""
    if isinstance(error, TransferFailed):
        return error
    logger.error("a block or note could not be sent", exc_info=error)
    return TransferFailed(f"{type(error).__name__}: {error}")
