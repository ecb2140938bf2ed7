"""Triton's block copies, checksum and sum by keys against torch and the host, on any device."""

from __future__ import annotations

import torch

from shared.kernels.backend import Kernels
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
    assert _key_sums(kernels, pool, ids) == _key_sums(TorchKernels(), pool, ids)
    if len(set(block_ids)) == len(block_ids):
        target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
        kernels.scatter_blocks(gathered, target, ids)
        expected[ids] = gathered
        assert torch.equal(target, expected)


def _key_sums(kernels: Kernels, pool: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """With keys of all ones too, whose products are the largest."""
    num_words = pool[:1].nbytes // 8
    drawn = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=torch.Generator().manual_seed(num_words))
    found = []
    for keys in (drawn, torch.full_like(drawn, -1)):
        parts = kernels.block_key_sums(pool, ids, keys.to(pool.device)).tolist()
        found += [sum(part << 32 * place for place, part in enumerate(row)) for row in parts]
    return found
