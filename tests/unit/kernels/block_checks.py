"""Triton's block copies and checksum against torch and the host's checksum, on any device."""

from __future__ import annotations

import torch

from shared.kernels.torch_backend import TorchKernels
from shared.kv.checksum import BlockChecksum

from .comparing import random_tensor, triton_kernels


def check_blocks(
    num_blocks: int,
    block_shape: tuple[int, ...],
    block_ids: list[int],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Gathered, scattered and checked, bit for bit."""
    kernels = triton_kernels()
    pool = random_tensor(num_blocks, *block_shape, dtype=dtype, device=device)
    ids = torch.tensor(block_ids, dtype=torch.int64, device=device)
    gathered = kernels.gather_blocks(pool, ids)
    assert torch.equal(gathered, pool[ids])
    checksums = kernels.block_checksums(pool, ids)
    host = BlockChecksum(pool[:1].nbytes // 8).checksum_blocks(pool.cpu(), block_ids)
    assert [value % 2**64 for value in checksums.tolist()] == host
    assert torch.equal(TorchKernels().block_checksums(pool, ids), checksums)
    if len(set(block_ids)) == len(block_ids):
        target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
        kernels.scatter_blocks(gathered, target, ids)
        expected[ids] = gathered
        assert torch.equal(target, expected)
