"""Block checksums against a big-integer reference."""

from __future__ import annotations

import pytest
import torch

from shared.kv.checksum import BlockChecksum

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def reference(data: bytes) -> int:
    words = (int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))
    return sum(word * (2 * splitmix64(i) + 1) for i, word in enumerate(words)) & MASK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_big_integer_sum(dtype: torch.dtype) -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    pool = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    check = BlockChecksum(pool[0].numel() * pool.element_size() // 8)
    expected = [reference(bytes(block.view(torch.uint8).flatten().tolist())) for block in pool]
    assert check.checksum_blocks(pool, [3, 0, 0]) == [expected[3], expected[0], expected[0]]
    assert check.checksum(pool[2]) == expected[2]


def test_every_flipped_bit_and_every_swap_of_words_shows() -> None:
    block = torch.randint(0, 256, (128,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    check = BlockChecksum(16)
    good = check.checksum(block)
    for bit in range(128 * 8):
        flipped = block.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        assert check.checksum(flipped) != good
    words = block.view(torch.int64)
    for i in range(16):
        for j in range(i):
            swapped = words.clone()
            swapped[[i, j]] = words[[j, i]]
            assert check.checksum(swapped) != good


def test_a_pool_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 4"):
        BlockChecksum(4).checksum_blocks(torch.zeros(2, 5, dtype=torch.int64), [0])
    with pytest.raises(ValueError, match="contiguous"):
        BlockChecksum(4).checksum_blocks(torch.zeros(4, 2, dtype=torch.int64).T, [0])
    with pytest.raises(ValueError, match="multiple of 8"):
        BlockChecksum(1).checksum_blocks(torch.zeros(2, 12, dtype=torch.uint8), [0])
