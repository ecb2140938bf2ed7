"""A KV pool in memory that a group's processes share."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kv.layout import BlockLayout


def map_pool(descriptor: int, layout: BlockLayout, num_blocks: int, *, is_leader: bool) -> Tensor:
    """[num_blocks, num_layers, 2, num_kv_heads, head_bytes] uint8, zeros at first, in the memory behind
    `descriptor`, which the leader makes long enough before the others map it. Raises ConfigError where it cannot."""
    num_bytes = num_blocks * layout.block_bytes
    try:
        if is_leader:
            os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"a pool of {num_blocks} blocks, {num_bytes} bytes, cannot be shared between ranks: {error}",
            field="num_kv_blocks",
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(layout.shape(num_blocks))
