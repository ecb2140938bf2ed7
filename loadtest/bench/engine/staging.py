"""`python -m loadtest.bench staging`: how fast blocks pass between a pool and the host memory of transfers."""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated

import torch

from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from shared.engine.runner.block_access import StagedBlocks
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pool_memory import allocate_pool
from shared.errors import ConfigError
from shared.kv.layout import BlockLayout, KVFormat

LAYOUT = BlockLayout(32, 16, KVFormat("bfloat16", num_kv_heads=8, head_dim=128))
"""An 8B model's: 2 MiB a block."""
CHUNK_BLOCKS = 128
"""Blocks of a prompt's chunk, which leave together."""


def rates(device: torch.device, layout: BlockLayout, num_blocks: int, repeats: int) -> list[Result]:
    """Copying rates of a prompt of `num_blocks` blocks, out of the pool and back into it; a chunk's memory is free once
    it was sent."""
    pool = allocate_pool(layout, num_blocks, device)
    staged = StagedBlocks(pool, DeviceLink(device))
    out_s, in_s = [], []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for first in range(0, num_blocks, CHUNK_BLOCKS):
            staged.outgoing(range(first, min(first + CHUNK_BLOCKS, num_blocks)))
        out_s.append(time.perf_counter() - begin)
        arrived = list(enumerate(staged.incoming(range(num_blocks))))
        begin = time.perf_counter()
        staged.store(arrived)
        in_s.append(time.perf_counter() - begin)
    num_bytes = num_blocks * layout.block_bytes
    return [
        Result(f"{num_blocks} blocks, {way}", num_bytes / median(seconds[1:]) / 1e9, "GB/s")
        for way, seconds in (("sent", out_s), ("received", in_s))
    ]


def main(
    device: Annotated[str, Option("cpu, cuda or cuda:N")] = "cuda",
    blocks: Annotated[int, Option("blocks of 2 MiB of a prompt")] = 512,
    repeats: Annotated[int, Option()] = 5,
    out: Out = None,
) -> None:
    """Measure staging through host memory."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but torch sees no CUDA device", field="device")
    report = Report(out)
    report.add(rates(place, LAYOUT, blocks, repeats))
    report.print()
