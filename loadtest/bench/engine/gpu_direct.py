"""`python -m loadtest.bench gpu-direct`: blocks from one process's pool into another's by device pointers.

Every block is checked where it arrives, by the device. Beside it, `staging` measures what the way by host memory adds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.engine.staging import LAYOUT
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from shared.engine.runner.block_access import BlockSums, DeviceBlocks
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pool_memory import allocate_pool
from shared.errors import ConfigError, TransferFailed
from shared.kernels.backends.registry import AUTO, choose_kernels
from shared.kv.layout import BlockLayout
from shared.kv.transfer import new_ticket
from shared.kv.ucx import UcxTransfer

DEADLINE_S = 60.0
TRAILER_BYTES = 8


class Side:
    """A pool and its transfer plane."""

    def __init__(self, device: torch.device, layout: BlockLayout, num_blocks: int) -> None:
        self.pool = allocate_pool(layout, num_blocks, device)
        is_gpu = device.type == "cuda"
        kernels = choose_kernels(device, torch.bfloat16 if is_gpu else torch.float32, AUTO if is_gpu else "torch")
        link = DeviceLink(device)
        self.sums = BlockSums(layout, self.pool, kernels, link)
        self.blocks = DeviceBlocks(self.pool, link, self.sums)
        bind_gpu = partial(torch.cuda.set_device, device.index or 0) if is_gpu else None
        self.transfer = UcxTransfer(bind_gpu=bind_gpu)


async def receive(side: Side, sender: Connection, num_blocks: int, repeats: int) -> list[float]:
    """Seconds of each of the repeats, from the ticket to the last block. Raises TransferFailed for a damaged one."""
    seconds = []
    async with asyncio.timeout(DEADLINE_S * (repeats + 1)):
        await side.transfer.start()
        try:
            sums: list[int] = await asyncio.to_thread(sender.recv)
            for _ in range(repeats + 1):
                side.pool.zero_()
                memory = list(enumerate(side.blocks.incoming(range(num_blocks))))
                ticket, begin = new_ticket(), time.perf_counter()
                incoming = side.transfer.expect(ticket, memory, TRAILER_BYTES)
                sender.send((side.transfer.address, ticket))
                await incoming.blocks(range(num_blocks))
                seconds.append(time.perf_counter() - begin)
                await side.transfer.cancel(ticket)
                found = side.sums.of(range(num_blocks))
                damaged = sum(ours != theirs for ours, theirs in zip(found, sums, strict=True))
                if damaged:
                    raise TransferFailed(f"{damaged} of {num_blocks} blocks arrived damaged")
            sender.send(None)
        finally:
            await side.transfer.close()
    return seconds[1:]  # the first one opens the endpoint


async def _send(side: Side, receiver: Connection, num_blocks: int) -> None:
    await side.transfer.start()
    try:
        receiver.send(side.sums.of(list(range(num_blocks))))
        while (asked := await asyncio.to_thread(receiver.recv)) is not None:
            address, ticket = asked
            blocks = [(index, memory) for index, memory in enumerate(side.blocks.outgoing(range(num_blocks)))]
            await side.transfer.send_blocks(address, ticket, blocks, lambda: None)
    finally:
        await side.transfer.close()


def run_sender(receiver: Connection, device: str, layout: BlockLayout, num_blocks: int) -> None:
    """The other process; ends with the connection."""
    side = Side(torch.device(device), layout, num_blocks)
    side.pool.random_(generator=torch.Generator(side.pool.device).manual_seed(1))
    asyncio.run(_send(side, receiver, num_blocks))


def rate(device: str, layout: BlockLayout, num_blocks: int, repeats: int) -> Result:
    """The median over `repeats` prompts of `num_blocks` blocks."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    sender = processes.Process(target=run_sender, args=(theirs, device, layout, num_blocks), daemon=True)
    sender.start()
    theirs.close()
    try:
        seconds = asyncio.run(receive(Side(torch.device(device), layout, num_blocks), ours, num_blocks, repeats))
        sender.join(DEADLINE_S)
    finally:
        ours.close()
        sender.kill()
    return Result(f"{num_blocks} blocks, directly", num_blocks * layout.block_bytes / median(seconds) / 1e9, "GB/s")


def main(
    device: Annotated[str, Option("cuda or cuda:N")] = "cuda",
    blocks: Annotated[int, Option("blocks of 2 MiB of a prompt")] = 512,
    repeats: Annotated[int, Option()] = 5,
    out: Out = None,
) -> None:
    """Measure transfers from a GPU's memory into a GPU's memory."""
    if torch.device(device).type != "cuda":
        raise ConfigError(f"device is {device}, but only a GPU's blocks are sent by device pointers", field="device")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but torch sees no CUDA device", field="device")
    report = Report(out)
    report.add([rate(device, LAYOUT, blocks, repeats)])
    report.print()
