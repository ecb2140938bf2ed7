"""The far side of a transfer under test: commands for a `KVTransfer`, in this process or over the pipes of another.

As a program (`python -m tests.integration.kv.far_side [HOST_ID [FLEET_KEY [ENCRYPTION]]]`) it reads one JSON command a
line from stdin, runs them concurrently, and writes an answer for each to stdout; it ends with stdin.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import uvloop

from shared.errors import TransferFailed
from shared.kernels.cpu.packing import fastest_packing
from shared.kv.encryption_modes import NO_ENCRYPTION
from shared.kv.fleet_key import FleetKey, seal_of
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.link_rate import LinkRate
from shared.kv.handoff.shipment import Shipment
from shared.kv.handoff.wire import Wire
from shared.kv.packing import BlockPacking
from shared.kv.pool import OutgoingBlock
from shared.kv.seal import Purpose
from shared.kv.transfer import TRAILER_INDEX, Incoming, KVTransfer
from shared.kv.ucx import UcxTransfer

TRAILER_BYTES = 40
UNTOUCHED = 0x55
BLOCK_BYTES = 40_000
NUM_TOKENS = 77
FIRST_TOKEN = 7
Sizes = Sequence[tuple[int, int]]
"""(block index, bytes) of each block."""


def content(ticket: int, index: int, num_bytes: int) -> bytes:
    """What a sender sends as this block of this ticket."""
    return hashlib.shake_128(f"{ticket}:{index}".encode()).digest(num_bytes)


def packable(ticket: int, index: int, num_bytes: int) -> bytes:
    """Of bfloat16 numbers with two exponents, so that packing shrinks it."""
    numbers = np.frombuffer(content(ticket, index, num_bytes), np.uint16)
    return (numbers & 0x80FF | 0x3F00).astype(np.uint16).tobytes()


def block_packing() -> BlockPacking:
    """By the library that workers use."""
    packer = fastest_packing()
    assert packer is not None, "this machine compiles no kernels"
    return BlockPacking(packer, BLOCK_BYTES, "bfloat16")


class Memory:
    """A receiver's memory for one ticket, by block index."""

    def __init__(self, sizes: Sizes) -> None:
        self.blocks = {index: bytearray([UNTOUCHED]) * num_bytes for index, num_bytes in sizes}

    @property
    def buffers(self) -> list[tuple[int, memoryview]]:
        """As `expect` wants it."""
        return [(index, memoryview(block)) for index, block in self.blocks.items()]

    def holding(self, ticket: int) -> list[int]:
        """The blocks that hold what a sender sends."""
        return [i for i, block in self.blocks.items() if block == content(ticket, i, len(block))]

    def untouched(self) -> list[int]:
        """The blocks that nobody has written a byte to."""
        return [i for i, block in self.blocks.items() if block == bytes([UNTOUCHED]) * len(block)]


class FarSide:
    """Runs commands: `await handle({"op": ..., ...})` returns the answer."""

    def __init__(self, transfer: KVTransfer, key: FleetKey | None = None) -> None:
        self._transfer = transfer
        self._key = key
        self._memory: dict[int, Memory] = {}
        self._incoming: dict[int, Incoming] = {}

    async def handle(self, command: dict[str, Any]) -> Any:
        """Raises TransferFailed as the transfer does."""
        arguments = {name: value for name, value in command.items() if name != "op"}
        return await getattr(self, command["op"])(**arguments)

    async def address(self) -> str:
        """In hex."""
        return self._transfer.address.hex()

    async def expect(self, ticket: int, sizes: Sizes) -> None:
        """Posts receives."""
        memory = self._memory[ticket] = Memory(sizes)
        self._incoming[ticket] = self._transfer.expect(ticket, memory.buffers, TRAILER_BYTES)

    async def arrived(self, ticket: int, indexes: list[int]) -> list[int]:
        """Waits for trailer and blocks; the indexes that hold what they should."""
        await self._incoming[ticket].trailer()
        await self._incoming[ticket].blocks(indexes)
        return self._memory[ticket].holding(ticket)

    async def blocks(self, ticket: int, indexes: list[int]) -> None:
        """Waits for these."""
        await self._incoming[ticket].blocks(indexes)

    async def damaged(self, ticket: int) -> list[int]:
        """Blocks of a ticket that have arrived, and do not hold what they should."""
        holding = set(self._memory[ticket].holding(ticket))
        return [i for i in self._memory[ticket].blocks if self._incoming[ticket].arrived(i) and i not in holding]

    async def send(self, address: str, ticket: int, sizes: Sizes, trailer: bool = False) -> None:
        """Sends blocks at once, then a trailer."""
        sends = [(index, memoryview(content(ticket, index, num_bytes))) for index, num_bytes in sizes]
        to = bytes.fromhex(address)
        await asyncio.gather(*(self._transfer.send(to, ticket, index, memory) for index, memory in sends))
        if trailer:
            data = content(ticket, TRAILER_INDEX, TRAILER_BYTES)
            await self._transfer.send(to, ticket, TRAILER_INDEX, memoryview(data))

    async def ship(
        self,
        address: str,
        ticket: int,
        indexes: list[int],
        content_of: int,
        finish: bool = False,
        damaged: Sequence[int] = (),
        sealed_for: int | None = None,
        resummed: bool = False,
        swapped: Sequence[int] = (),
        packed: bool = False,
    ) -> dict[str, int]:
        """Ships whole blocks as a prefill worker does, with a note; `damaged` ones have a bit flipped on the way, of
        which the checksum knows if they are `resummed`; two `swapped` ones arrive in each other's place. `content_of`:
        the ticket whose content they have; `sealed_for`: the one whose seal, where it is another. `packed`: the content
        is packable, and is packed. Returns what this side has sent until now."""
        made = packable if packed else content
        memory = {index: bytearray(made(content_of, index, BLOCK_BYTES)) for index in indexes}
        wire = Wire(block_packing(), LinkRate(), unpack_bytes_s=1e9, mode="on") if packed else None
        check = ArrivalCheck(BLOCK_BYTES)
        sums = [check.checksum(_flipped(memory[index], resummed and index in damaged)) for index in indexes]

        async def views(block_ids: Sequence[int]) -> list[memoryview]:
            return [memoryview(memory[index]) for index in block_ids]

        shipment = Shipment(
            _Damaging(self._transfer, damaged, swapped), bytes.fromhex(address), ticket, len(indexes),
            views, lambda _: None, timeout_s=60.0,
            seal=seal_of(self._key, Purpose.HANDOFF, ticket if sealed_for is None else sealed_for, BLOCK_BYTES),
            wire=wire,
        )  # fmt: skip
        blocks = [OutgoingBlock("s", index, index, known) for index, known in zip(indexes, sums, strict=True)]
        shipment.add_noted(blocks)
        if finish:
            await shipment.finish(FIRST_TOKEN, NUM_TOKENS, finished=False)
        else:
            await shipment.sent()
        counters = self._transfer.counters
        return {"blocks_packed": counters.blocks_packed, "saved": counters.bytes_saved, "sent": counters.bytes_sent}

    async def cancel(self, ticket: int) -> None:
        """Ends a hand-off."""
        await self._transfer.cancel(ticket)

    async def untouched(self, ticket: int) -> list[int]:
        """The blocks of a ticket that were not written to."""
        return self._memory[ticket].untouched()

    async def drop_peer(self, address: str) -> None:
        """Forgets a peer."""
        self._transfer.drop_peer(bytes.fromhex(address))


class _Damaging:
    """A transfer plane that flips a bit of some blocks on their way, and swaps two."""

    def __init__(self, transfer: KVTransfer, damaged: Sequence[int], swapped: Sequence[int]) -> None:
        self._transfer = transfer
        self.counters = transfer.counters
        self._damaged = damaged
        self._swapped = dict(zip(swapped, reversed(swapped), strict=True))

    async def send(self, address: bytes, ticket: int, index: int, memory: memoryview) -> None:
        await self._transfer.send(address, ticket, index, memory)

    async def send_blocks(
        self, address: bytes, ticket: int, blocks: Sequence[tuple[int, memoryview]], on_taken: Callable[[], None]
    ) -> None:
        changed = [
            (self._swapped.get(index, index), _flipped(memory, index in self._damaged)) for index, memory in blocks
        ]
        await self._transfer.send_blocks(address, ticket, changed, on_taken)

    def drop_peer(self, address: bytes) -> None:
        self._transfer.drop_peer(address)


def _flipped(block: bytearray | memoryview, really: bool) -> memoryview:
    changed = bytearray(block)
    if really:
        changed[len(changed) // 3] ^= 8
    return memoryview(changed)


async def _answer(far: FarSide, command: dict[str, Any]) -> None:
    number = command.pop("number")
    try:
        answer = {"number": number, "result": await far.handle(command)}
    except TransferFailed as error:
        answer = {"number": number, "failed": error.message}
    print(json.dumps(answer), flush=True)


async def _serve(host_id: bytes | None, key: FleetKey | None) -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    transfer = UcxTransfer(host_id=host_id, fleet_key=key)
    await transfer.start()
    far = FarSide(transfer, key)
    running: set[asyncio.Task[None]] = set()
    while line := await commands.readline():
        task = asyncio.create_task(_answer(far, json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await transfer.close()


if __name__ == "__main__":
    host, secret, encryption = (*sys.argv[1:], "", "", "")[:3]
    uvloop.run(_serve(host.encode() or None, FleetKey.of(secret, encryption or NO_ENCRYPTION)))
