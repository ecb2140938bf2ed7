"""The sending process: for each JSON line on stdin one hand-off, then an empty line on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import get_args

import numpy as np
import uvloop

from shared.kernels.cpu.multilinear import fastest_sum
from shared.kv.encryption_modes import Encryption
from shared.kv.fleet_key import FleetKey, seal_of
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.outgoing_block import OutgoingBlock
from shared.kv.handoff.shipment import Shipment
from shared.kv.seal import Purpose
from shared.kv.ucx import UcxTransfer

SECRET = "a benchmark's key, no secret"
TIMEOUT_S = 60.0
BATCH = 16
"""Blocks that leave together, as those of one engine step do."""


def bench_keys() -> dict[Encryption, FleetKey]:
    """As workers have it, with each encryption."""
    keys = {name: FleetKey(SECRET.encode(), encryption=name) for name in get_args(Encryption)}
    for key in keys.values():
        key.use(fastest_sum())
    return keys


async def serve(num_blocks: int, block_bytes: int) -> None:
    """Ships the same blocks again and again until stdin ends."""
    keys, transfer, check = bench_keys(), UcxTransfer(), ArrivalCheck(block_bytes)
    memory = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    sums = [check.checksum(row.data) for row in memory]
    await transfer.start()
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print(flush=True)
    while line := await commands.readline():
        asked = json.loads(line)
        shipment = Shipment(
            transfer, bytes.fromhex(asked["address"]), asked["ticket"], num_blocks,
            lambda index: memory[index].data, lambda _: None, TIMEOUT_S,
            seal_of(keys.get(asked["seal"]), Purpose.HANDOFF, asked["ticket"], block_bytes),
        )  # fmt: skip
        blocks = [OutgoingBlock("", index, index, known) for index, known in enumerate(sums)]
        for begin in range(0, num_blocks, BATCH):
            if asked["noted"]:
                shipment.add_noted(blocks[begin : begin + BATCH])
            else:
                shipment.add(*blocks[begin : begin + BATCH])
        await shipment.finish(0, num_blocks, finished=False)
        print(flush=True)
    await transfer.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
