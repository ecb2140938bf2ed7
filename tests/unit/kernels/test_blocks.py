"""Whole blocks in torch: copies by id, and the checksum that the host computes."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.torch_backend import TorchKernels
from shared.kv.checksum import BlockChecksum

POOL = torch.randn(6, 2, 2, 1, 4, 8, generator=torch.Generator().manual_seed(0))


def test_scatter_undoes_gather_and_leaves_other_blocks() -> None:
    kernels, ids = TorchKernels(), torch.tensor([4, 0, 3])
    blocks = kernels.gather_blocks(POOL, ids)
    assert torch.equal(blocks, POOL[[4, 0, 3]])
    target = torch.zeros_like(POOL)
    kernels.scatter_blocks(blocks, target, ids)
    assert torch.equal(target[ids], POOL[ids])
    assert bool((target[[1, 2, 5]] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_those_of_the_host(dtype: torch.dtype) -> None:
    pool, ids = POOL.to(dtype), [5, 0, 0, 2]
    checksums = TorchKernels().block_checksums(pool, torch.tensor(ids)).tolist()
    host = BlockChecksum(pool[0].nbytes // 8).checksum_blocks(pool, ids)
    assert [value % 2**64 for value in checksums] == host
