"""`python -m loadtest.bench transfer`: hand-offs between two processes, in turns with and without checks and tags."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
import uvloop

from loadtest.bench.transfer.sender import TIMEOUT_S, bench_keys
from loadtest.command_line import Out
from loadtest.figures import Result, table, write
from shared.kv.block_memory import host_bytes
from shared.kv.encryption import CLASSES
from shared.kv.encryption_modes import Encryption
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.receive_handoff import HandoffReceiver
from shared.kv.handoff.receiving import receive_trailer
from shared.kv.handoff.trailer import trailer_bytes
from shared.kv.seal import Purpose, Seal
from shared.kv.transfer import new_ticket
from shared.kv.ucx import UcxTransfer

SEALS: dict[str, Encryption] = {
    "tagged by the fleet's key": "none",
    "encrypted, AES-GCM": "aes-gcm",
    "encrypted, ChaCha20-Poly1305": "chacha20-poly1305",
}
KINDS = ("bare", "checked at the end", "noted, checked on arrival", *SEALS)

Row = npt.NDArray[np.uint8]


class Receiver:
    """Receives hand-offs of one sending process into the same memory."""

    def __init__(self, sender: asyncio.subprocess.Process, num_blocks: int, block_bytes: int) -> None:
        self._sender = sender
        self._memory = np.zeros((num_blocks, block_bytes), np.uint8)
        self._check = ArrivalCheck(block_bytes)
        self._keys = bench_keys()
        self._transfer = UcxTransfer()

    async def start(self) -> None:
        """Opens the transfer plane."""
        await self._transfer.start()

    async def close(self) -> None:
        """Closes it."""
        await self._transfer.close()

    async def seconds(self, kind: str) -> float:
        """Of one hand-off, from the ticket to the last check."""
        begin = time.perf_counter()
        if kind in KINDS[:2]:
            ticket = new_ticket()
            buffers = [(index, row.data) for index, row in enumerate(self._memory)]
            incoming = self._transfer.expect(ticket, buffers, trailer_bytes(len(buffers)))
            self._ask(ticket, kind)
            await receive_trailer(self._transfer, ticket, incoming, TIMEOUT_S)
            if kind == KINDS[1]:
                for row in self._memory:
                    self._check.checksum(row.data)
        else:
            places = {index: row.data for index, row in enumerate(self._memory)}
            key = self._keys[SEALS[kind]] if kind in SEALS else None
            receiver = HandoffReceiver(self._transfer, self._check, places, len(places), key)
            ticket, _ = receiver.open()
            self._ask(ticket, kind)
            await receiver.receive(TIMEOUT_S)
            assert len(receiver.checksums) == len(places), "blocks arrived damaged"
        seconds = time.perf_counter() - begin
        assert self._sender.stdout is not None
        await self._sender.stdout.readline()
        return seconds

    def _ask(self, ticket: int, kind: str) -> None:
        asked = {"address": self._transfer.address.hex(), "ticket": ticket}
        asked |= {"noted": kind in KINDS[2:], "seal": SEALS.get(kind)}
        assert self._sender.stdin is not None
        self._sender.stdin.write(json.dumps(asked).encode() + b"\n")


async def hand_offs(num_blocks: int, block_bytes: int, repeats: int) -> list[Result]:
    """GB/s of the fastest of each kind, the kinds in turns."""
    sender = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.bench.transfer.sender", str(num_blocks), str(block_bytes),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert sender.stdout is not None
    assert sender.stdin is not None
    receiver = Receiver(sender, num_blocks, block_bytes)
    try:
        await receiver.start()
        await sender.stdout.readline()
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(repeats + 1):
            for kind in KINDS:
                seconds = await receiver.seconds(kind)
                if turn:  # the first one opens the endpoint
                    taken[kind].append(seconds)
    finally:
        sender.stdin.close()
        await sender.wait()
        await receiver.close()
    label = f"{num_blocks} x {block_bytes >> 10} KiB"
    num_bytes = num_blocks * block_bytes
    return [Result(f"{label}: {kind}", num_bytes / min(times) / 1e9, "GB/s") for kind, times in taken.items()]


def passes(block_bytes: int, repeats: int) -> list[Result]:
    """GB/s of what is done with each block, on one core; the fastest of many, which other load does not change."""
    num_blocks = max(1, (64 << 20) // block_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    target, check = np.empty(block_bytes, np.uint8), ArrivalCheck(block_bytes)
    seals = {name: key.seal(Purpose.HANDOFF, 1, block_bytes) for name, key in bench_keys().items()}
    works: dict[str, Callable[[Row], object]] = {
        "memcpy": lambda row: np.copyto(target, row),
        "checksum": lambda row: check.checksum(row.data),
        "tag": lambda row: seals["none"].close_blocks([(0, row.data)]),
    }
    for cipher, seal in seals.items():
        if cipher in CLASSES:
            works |= _encryption(cipher, seal, blocks[0])
    fastest = dict.fromkeys(works, float("inf"))
    for _ in range(repeats):
        for name, work in works.items():
            for row in blocks:
                begin = time.perf_counter()
                work(row)
                fastest[name] = min(fastest[name], time.perf_counter() - begin)
    label = f"{block_bytes >> 10} KiB"
    return [Result(f"{label}: {name}", block_bytes / seconds / 1e9, "GB/s") for name, seconds in fastest.items()]


def _encryption(name: str, seal: Seal, block: Row) -> dict[str, Callable[[Row], object]]:
    """What the sender does with a block, and the receiver with one that it got."""
    (sealed,) = seal.close_blocks([(0, block.data)])
    crossed = np.frombuffer(bytes(host_bytes(sealed.wire)), np.uint8)

    def encrypt(row: Row) -> None:
        seal.give_back(seal.close_blocks([(0, row.data)])[0])

    def decrypt(row: Row) -> None:
        np.copyto(row, crossed)
        assert seal.open_block(0, row.data, sealed.tag)

    return {f"encrypt, {name}": encrypt, f"memcpy and decrypt, {name}": decrypt}


async def measure(sizes: list[tuple[int, int]], repeats: int) -> list[Result]:
    """Of (blocks, bytes a block)."""
    results: list[Result] = []
    for num_blocks, block_bytes in sizes:
        results += passes(block_bytes, repeats)
        results += await hand_offs(num_blocks, block_bytes, repeats)
    return results


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Hand-offs of each kind.")] = 15,
    out: Out = None,
) -> None:
    """What notes, checks and tags cost a hand-off between two processes of this machine."""
    results = uvloop.run(measure([(128, 32 << 10), (16, 2 << 20)], repeats))
    print(table(results))
    if out is not None:
        write(out, results)
