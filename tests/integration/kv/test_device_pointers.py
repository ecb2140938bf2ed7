"""Blocks by device pointers over UCX, checked by the device where they arrive. The pools lie in host memory here."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import torch

from shared.engine.runner.block_access import BlockSums, DeviceBlocks
from shared.engine.runner.device_link import DeviceLink
from shared.kernels.torch_backend import TorchKernels
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.arrival_check import Announced, ArrivalCheck
from shared.kv.layout import BlockLayout, KVFormat
from shared.kv.seal import Purpose
from shared.kv.transfer import TRAILER_INDEX, new_ticket
from shared.kv.ucx import UcxTransfer

LAYOUT = BlockLayout(4, 16, KVFormat("float32", num_kv_heads=4, head_dim=64))  # 128 KiB a block
DEADLINE_S = 300.0


@dataclass
class Side:
    """A pool behind device pointers, and its transfer."""

    pool: torch.Tensor
    bound: list[str] = field(default_factory=list)  # threads that were given the GPU

    def __post_init__(self) -> None:
        link = DeviceLink(self.pool.device)
        self.sums = BlockSums(LAYOUT, self.pool, TorchKernels(), link)
        self.blocks = DeviceBlocks(self.pool, link, self.sums)
        self.transfer = UcxTransfer(bind_gpu=lambda: self.bound.append(threading.current_thread().name))


async def test_blocks_arrive_by_pointer_and_a_damaged_or_forged_one_is_found() -> None:
    shape = LAYOUT.shape(4)
    sender, receiver = Side(torch.randint(256, shape, dtype=torch.uint8)), Side(torch.zeros(shape, dtype=torch.uint8))
    key, other = (FleetKey(secret * 16) for secret in (b"k", b"o"))
    async with asyncio.timeout(DEADLINE_S):
        for side in (sender, receiver):
            await side.transfer.start()
        try:
            ticket, moves = new_ticket(), {0: (3, 1), 1: (0, 2), 2: (2, 0)}  # index -> block there, block here
            arriving = dict(zip(moves, receiver.blocks.incoming([to for _, to in moves.values()]), strict=True))
            leaving = {index: sender.blocks.outgoing([block_id])[0] for index, (block_id, _) in moves.items()}
            incoming = receiver.transfer.expect(ticket, list(arriving.items()), 8)
            sends = [
                sender.transfer.send(receiver.transfer.address, ticket, index, memory)
                for index, memory in leaving.items()
            ]
            trailer = memoryview(bytearray(b"that all"))
            await asyncio.gather(
                *sends, sender.transfer.send(receiver.transfer.address, ticket, TRAILER_INDEX, trailer)
            )
            assert await incoming.trailer() == b"that all"
            await incoming.blocks(list(moves))
            receiver.blocks.store([(to, arriving[index]) for index, (_, to) in moves.items()])
            await receiver.transfer.cancel(ticket)
        finally:
            for side in (sender, receiver):
                await side.transfer.close()
    for block_id, to in moves.values():
        assert torch.equal(receiver.pool[to], sender.pool[block_id])
    assert not receiver.pool[3].any()

    seals = [maker.seal(Purpose.HANDOFF, ticket, LAYOUT.block_bytes) for maker in (key, other)]
    tags = [[closed.tag for closed in seal.close_blocks(list(leaving.items()))] for seal in seals]
    on_host = [(index, memoryview(sender.pool[block_id].numpy()).cast("B")) for index, (block_id, _) in moves.items()]
    assert tags[0] == [closed.tag for closed in seals[0].close_blocks(on_host)]
    receiver.pool[0, 0, 0, 0, 0] += 1
    sums = sender.sums.of([block_id for block_id, _ in moves.values()])
    for seal, sealed_by, sound in (
        (None, 0, [True, True, False]), (seals[0], 0, [True, True, False]), (seals[0], 1, [False] * 3),
    ):  # fmt: skip
        announced = [
            (index, arriving[index], Announced(total, tag))
            for index, total, tag in zip(moves, sums, tags[sealed_by], strict=True)
        ]
        assert await ArrivalCheck(LAYOUT.block_bytes).sound(announced, seal) == sound
    for side in (sender, receiver):
        assert len(side.bound) == 1  # in UCX's own thread
        assert side.bound != [threading.current_thread().name]


REFUSED = """
import asyncio
from shared.errors import ConfigError
from shared.kv.ucx import UcxTransfer

async def start():
    transfer = UcxTransfer(bind_gpu=lambda: None, needs_gpu=False)
    await transfer.start()
    print(transfer.takes_gpu_memory)
    await transfer.close()
    try:
        await UcxTransfer(bind_gpu=lambda: None).start()
    except ConfigError as error:
        print(error.field)

asyncio.run(start())
"""


def test_a_ucx_without_cuda_transports_is_refused_where_it_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=os.environ | {"UCX_TLS": "tcp,sm,self"},
    )  # fmt: skip
    assert done.stdout.split() == ["False", "gpu_direct"], done.stderr
