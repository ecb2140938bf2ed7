"""How decode attention is cut: the grid has room for every part that the kernel's schedule can make."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.attention.decode.splits import DecodeConfig, decode_config, decode_grid
from shared.kernels.device import DeviceLimits

H100 = DeviceLimits("sm_90", 227 * 1024, num_multiprocessors=132)


def parts_of(kv_lens: list[int], num_items: int, config: DecodeConfig) -> list[int]:
    """The kernel's schedule (`plan_decode_items`), without a window."""
    tiles = [-(-kv_len // config.tile) for kv_len in kv_lens]
    longest = max(-(-sum(tiles) // num_items), config.min_tiles)
    part_tiles = [max(1, -(-count // max(1, -(-count // longest)))) for count in tiles]
    return [max(1, -(-count // size)) for count, size in zip(tiles, part_tiles, strict=True)]


@settings(max_examples=100)
@given(
    kv_lens=st.lists(st.integers(0, 70_000), min_size=1, max_size=64),
    slack=st.integers(0, 5000),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    num_multiprocessors=st.sampled_from([8, 108, 132]),
    config=st.builds(
        DecodeConfig,
        tile=st.sampled_from([16, 64, 128]),
        min_tiles=st.integers(1, 8),
        parts_per_multiprocessor=st.integers(1, 16),
        num_warps=st.just(4),
        num_stages=st.just(3),
    ),
)
def test_parts_fit_the_grid_whatever_the_lengths(
    kv_lens: list[int], slack: int, num_kv_heads: int, num_multiprocessors: int, config: DecodeConfig
) -> None:
    grid = decode_grid(len(kv_lens), max(kv_lens) + slack, num_kv_heads, num_multiprocessors, config)
    parts = parts_of(kv_lens, grid.num_items, config)
    assert sum(parts) <= grid.num_slots
    assert grid.has_merge or max(parts) == 1


def test_a_long_sequence_alone_fills_the_device() -> None:
    config = decode_config(head_dim=128, element_bytes=2, limits=H100)
    grid = decode_grid(1, 131_072, 8, 132, config)
    assert 8 * parts_of([131_072], grid.num_items, config)[0] >= 4 * 132


def test_short_sequences_stay_whole() -> None:
    config = decode_config(head_dim=128, element_bytes=2, limits=H100)
    grid = decode_grid(4, 4096, 8, 132, config)
    assert parts_of([200] * 4, grid.num_items, config) == [1] * 4
