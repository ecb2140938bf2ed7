"""One hand-off as its sender sees it: blocks leave while later chunks compute, a trailer closes it.

A note is a message like the trailer, under the same tag and so in order before it. It names the blocks that have begun
to leave since the note before: notes are at most as many as engine steps, and fewer where the receiver is behind.

A receive must be posted before its message arrives, so its size cannot depend on the content: a trailer for n
blocks always takes `trailer_bytes(n)`: a little-endian u32 length, the HandoffTrailer message, zeros.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Self

from google.protobuf.message import DecodeError

from shared.errors import TransferFailed
from shared.kv.block_memory import AsSent, BlockMemory, each_beside_loop
from shared.kv.handoff.wire import ClosedBlock, Wire, close_packed
from shared.kv.pool import OutgoingBlock
from shared.kv.seal import Seal, SealedBlock
from shared.kv.transfer import TRAILER_INDEX, KVTransfer
from shared.rpc.pb.tandem.v1 import types_pb2

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_FIXED_BYTES = 64  # length prefix, scalar fields, tags and lengths of the two packed lists
_BYTES_PER_BLOCK = 5 + 8  # a varint index and a fixed64 checksum
_BYTES_PER_PACKED = 5  # a varint size
_TAG_FRAME_BYTES = 2  # before each block's tag


def trailer_bytes(num_blocks: int, seal: Seal | None = None, *, packed: bool = False) -> int:
    """Bytes of every trailer for a hand-off of at most `num_blocks` blocks, and the most of a note. `packed`: the most
    of a note with sizes of packed blocks, for a receiver that takes them; trailers have none."""
    tags = (_TAG_FRAME_BYTES + seal.tag_bytes) * num_blocks + seal.tag_bytes if seal is not None else 0
    sizes = _BYTES_PER_PACKED * num_blocks if packed else 0
    return _FIXED_BYTES + _BYTES_PER_BLOCK * num_blocks + sizes + tags


def encode_note(note: types_pb2.HandoffTrailer, seal: Seal | None = None, number: int = 0) -> bytes:
    """A note for the receive of a trailer: as short as its content, which no receive minds. `number`: as for
    `encode_trailer`."""
    assert note.more, "a note says that more follows"
    return _encode(note, seal, number)


def encode_trailer(
    trailer: types_pb2.HandoffTrailer, num_blocks: int, seal: Seal | None = None, number: int = 0
) -> bytes:
    """The trailer padded to `trailer_bytes(num_blocks)`. With a `seal` it is sealed as the hand-off's message of this
    number: notes and trailer count from 0 on."""
    data = _encode(trailer, seal, number)
    size = trailer_bytes(num_blocks, seal)
    assert len(data) <= size, f"a trailer of {len(data)} bytes for {num_blocks} blocks"
    return data.ljust(size, b"\0")


def decode_trailer(data: bytes, seal: Seal | None = None, number: int = 0) -> types_pb2.HandoffTrailer:
    """Inverse of `encode_trailer` and `encode_note`. Raises TransferFailed on bytes that are neither, and with a `seal`
    on a message that it has not sealed with this number."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length + (seal.tag_bytes if seal is not None else 0)
    if end > len(data):
        raise TransferFailed(f"trailer claims {length} bytes, {len(data)} arrived")
    body = data[_LENGTH.size : end]
    if seal is not None:
        body = seal.open_message(number, body)
    try:
        trailer = types_pb2.HandoffTrailer.FromString(body)
    except DecodeError as error:
        raise TransferFailed("the trailer is not a HandoffTrailer") from error
    if len(trailer.block_indexes) != len(trailer.checksums):
        raise TransferFailed("the trailer has not one checksum a block")
    if len(trailer.packed_bytes) not in (0, len(trailer.checksums)):
        raise TransferFailed("the message has not one size a block", field="packed_bytes")
    tagged = bool(trailer.block_tags) or (seal is not None and trailer.more)
    if tagged and len(trailer.block_tags) != len(trailer.checksums):
        raise TransferFailed("the message has not one tag a block", field="block_tags")
    return trailer


def _encode(message: types_pb2.HandoffTrailer, seal: Seal | None, number: int) -> bytes:
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + (body if seal is None else seal.close_message(number, body))


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
        memory: Callable[[Sequence[int]], Awaitable[Sequence[BlockMemory]]],
        release: Callable[[Sequence[OutgoingBlock]], None],
        timeout_s: float,
        seal: Seal | None = None,
        convert: Callable[[Sequence[BlockMemory]], list[AsSent]] | None = None,
        wire: Wire | None = None,
    ) -> None:
        """`memory(block_ids)` gives the bytes of each, `release(blocks)` gives the sender's references back. A receiver
        that has not taken all `timeout_s` after the last chunk is given up. `seal` protects blocks, notes and the
        trailer. `convert`, for any thread, makes of blocks what is sent in their place, sealed and checked. `wire`: of
        a receiver that takes packed blocks, for blocks that notes name."""
        self._wire = wire
        # With packing, one part is packed while the one before is on its way.
        self._closing: AbstractAsyncContextManager[object] = nullcontext() if wire is None else asyncio.Lock()
        self._convert = convert
        self._transfer = transfer
        self.address = address
        """The receiver's transfer address."""
        self._ticket = ticket
        self._num_needed = num_needed
        self._memory = memory
        self._release = release
        self._timeout_s = timeout_s
        self._seal = seal
        self._num_messages = 0  # notes and trailer
        self._unnoted: list[tuple[OutgoingBlock, ClosedBlock]] = []  # blocks that leave
        self._noting: asyncio.Task[None] | None = None
        self._checksums: dict[int, int] = {}  # of converted blocks, by index
        self._tags: dict[int, bytes] = {}  # of blocks without a note, for the trailer
        self._sends: list[asyncio.Task[None]] = []
        self._sent: list[OutgoingBlock] = []
        self.num_posted = 0
        """Messages handed to the transfer so far: blocks, notes, the trailer."""
        self.num_taken = 0
        """Blocks whose sending is complete."""
        self._error: TransferFailed | None = None
        self._finishing = False
        self._dropped = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._finishing:
            await asyncio.shield(self.abort())

    @property
    def num_blocks(self) -> int:
        """Blocks handed to the transfer so far."""
        return len(self._sent)

    def add(self, *blocks: OutgoingBlock) -> asyncio.Future[list[bytes]]:
        """Starts sending blocks; the trailer names them. Gives their tags by the seal (empty without one), which need
        not be awaited, as soon as they are made; raises TransferFailed where they cannot be."""
        tags: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._sent.extend(blocks)
        self._sends.append(asyncio.create_task(self._send_batch(blocks, tags)))
        return tags

    def add_noted(self, blocks: Sequence[OutgoingBlock]) -> None:
        """Starts sending blocks, and a note with their checksums: the receiver, which must take notes, can tell at once
        what has arrived undamaged."""
        self._sent.extend(blocks)
        self._sends.append(asyncio.create_task(self._send_batch(blocks, None)))

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
        """The receiver is gone: sends to it fail now instead of waiting for it, also those of blocks still to seal."""
        self._dropped = True
        self._transfer.drop_peer(self.address)

    def give_up(self, error: TransferFailed) -> None:
        """The receiver cannot be reached: as `drop_receiver`; the hand-off ends with `error` and without a trailer."""
        self._error = self._error or error
        self.drop_receiver()

    async def _all_sent(self) -> None:
        """Returns when every block given to `add` was sent or given up."""
        if self._sends:
            _, stuck = await asyncio.wait(self._sends, timeout=self._timeout_s)
            if stuck:
                self.drop_receiver()
                await asyncio.wait(stuck)

    async def _send_batch(self, blocks: Sequence[OutgoingBlock], tags: asyncio.Future[list[bytes]] | None) -> None:
        """Seals and sends blocks; `tags` takes theirs, None: a note does."""
        try:
            async with self._closing:
                closed = await self._close_blocks(blocks, packs=tags is None)
        except Exception as error:
            self._error = _as_failure(error)
            self._release(blocks)
            if tags is not None and not tags.done():
                tags.set_exception(self._error)
                tags.exception()  # the owner of the blocks may not read it
            return
        made = [item.sealed.tag for item in closed]
        noting: asyncio.Task[None] | None = None
        if tags is None:
            self._unnoted += zip(blocks, closed, strict=True)
            if self._noting is None or self._noting.done():
                self._noting = asyncio.create_task(self._send_notes())
            noting = self._noting
        else:
            self._tags.update((block.index, tag) for block, tag in zip(blocks, made, strict=True) if tag)
            if not tags.done():
                tags.set_result(made)
        await self._send(blocks, closed)
        if noting is not None:
            await asyncio.wait((noting,))

    async def _close_blocks(self, blocks: Sequence[OutgoingBlock], *, packs: bool) -> list[ClosedBlock]:
        memory = await self._memory([block.block_id for block in blocks])
        if self._convert is not None:
            converted = await each_beside_loop(memory, memory, self._convert)
            memory = [made.memory for made in converted]
            self._checksums.update((block.index, made.checksum) for block, made in zip(blocks, converted, strict=True))
        seal = self._seal
        packing = self._wire.packing() if packs and self._wire is not None else None
        if seal is None and packing is None:
            return [ClosedBlock(SealedBlock(place)) for place in memory]

        def close(pairs: Sequence[tuple[int, BlockMemory]]) -> list[ClosedBlock]:
            if packing is None:
                assert seal is not None
                return list(map(ClosedBlock, seal.close_blocks(pairs)))
            return [close_packed(index, place, packing, seal) for index, place in pairs]

        pairs = [(block.index, place) for block, place in zip(blocks, memory, strict=True)]
        return await each_beside_loop(pairs, memory, close)

    async def _send(self, blocks: Sequence[OutgoingBlock], closed: Sequence[ClosedBlock]) -> None:
        try:
            if self._dropped:
                raise TransferFailed("the peer is gone")
            if self._error is None and blocks:
                self.num_posted += len(blocks)
                leaving = [(block.index, item.sealed.wire) for block, item in zip(blocks, closed, strict=True)]
                sending = self._transfer.send_blocks(self.address, self._ticket, leaving, self._count_taken)
                if self._wire is None:
                    await sending
                else:
                    await self._wire.timed(sum(memory.nbytes for _, memory in leaving), sending)
                    self._wire.count(closed, self._transfer.counters)
                if self._seal is not None:
                    for item in closed:
                        self._seal.give_back(item.sealed)
        except Exception as error:
            self._error = self._error or _as_failure(error)
        finally:
            self._release(blocks)

    def _count_taken(self) -> None:
        self.num_taken += 1

    async def _send_notes(self) -> None:
        """One after the other, each with all that has begun to leave by then."""
        try:
            while self._unnoted and self._error is None:
                noted, self._unnoted = self._unnoted, []
                note = types_pb2.HandoffTrailer(
                    more=True,
                    block_indexes=[block.index for block, _ in noted],
                    checksums=[self._checksum(block) for block, _ in noted],
                    block_tags=[item.sealed.tag for _, item in noted if item.sealed.tag],
                )
                if any(item.packed is not None for _, item in noted):
                    note.packed_bytes.extend(item.packed_bytes for _, item in noted)
                data = bytearray(encode_note(note, self._seal, self._next_number()))
                self.num_posted += 1
                await self._transfer.send(self.address, self._ticket, TRAILER_INDEX, memoryview(data))
        except Exception as error:
            self._error = self._error or _as_failure(error)

    def _checksum(self, block: OutgoingBlock) -> int:
        """Checksum of the bytes that are sent."""
        return self._checksums.get(block.index, block.checksum)

    def _next_number(self) -> int:
        self._num_messages += 1
        return self._num_messages - 1

    async def _send_trailer(self, trailer: types_pb2.HandoffTrailer) -> None:
        if not self.address:  # no receiver: the prompt's blocks stay where they were computed
            return
        trailer.block_indexes.extend(block.index for block in self._sent)
        trailer.checksums.extend(map(self._checksum, self._sent))
        if self._tags:
            trailer.block_tags.extend(self._tags.get(block.index, b"") for block in self._sent)
        data = bytearray(encode_trailer(trailer, self._num_needed, self._seal, self._next_number()))
        self.num_posted += 1
        sending = asyncio.create_task(self._transfer.send(self.address, self._ticket, TRAILER_INDEX, memoryview(data)))
        _, stuck = await asyncio.wait((sending,), timeout=self._timeout_s)
        if stuck:
            self.drop_receiver()
        try:
            await sending
        except TransferFailed as error:
            raise self._error or error from error


def _as_failure(error: Exception) -> TransferFailed:
    """What ends the hand-off, also for a bug: the receiver must get it, and the blocks are given back."""
    if isinstance(error, TransferFailed):
        return error
    logger.error("a block or note could not be sent", exc_info=error)
    return TransferFailed(f"{type(error).__name__}: {error}")
