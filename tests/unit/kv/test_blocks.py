"""A block: its hash, its checksum, its layout."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest, ModelMismatch
from shared.kv.checksum import BlockChecksum
from shared.kv.hashing import HASH_BYTES, ChainRoots, block_hash, chain, extend_chain, root_hash
from shared.kv.layout import BlockLayout, KVFormat
from shared.rpc.convert import layout_from_proto, layout_to_proto

ROOT = root_hash("model", "float32", 1)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_block_hash_is_blake2b_of_parent_and_little_endian_ids() -> None:
    data = ROOT + bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert block_hash(ROOT, [1, 256]) == blake2b(data, digest_size=HASH_BYTES).digest()


def test_no_two_fields_of_the_root_can_be_confused() -> None:
    roots = [
        root_hash("ab", "c", 1),
        root_hash("a", "bc", 1),
        root_hash("ab", "c", 11),
        root_hash("ab", KVFormat("float32", 1, 8).name, 1),
        *(root_hash("ab", KVFormat(dtype, 1, 8).name, 1) for dtype in ("bfloat16", "int8", "float8_e4m3fn")),
        root_hash("ab", "c", 1, adapter="x"),
        root_hash("ab", "c", 1, salt="x"),
        root_hash("ab", "c", 1, rope_len=1),
    ]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {HASH_BYTES}


def test_prompts_of_every_length_share_a_root_where_the_rotation_is_fixed() -> None:
    roots = ChainRoots("model", "float32", 1)
    assert {roots.of("t", length) for length in (1, 40, 10_000)} == {root_hash("model", "float32", 1, salt="t")}


def test_prompts_beyond_a_dynamic_ropes_trained_length_share_with_those_of_their_own_length_alone() -> None:
    roots = ChainRoots("model", "float32", 1, rope_trained_len=40)
    assert roots.of("t", 1) == roots.of("t", 40) == root_hash("model", "float32", 1, salt="t")
    assert len({roots.of("t", length) for length in (40, 41, 42)}) == 3
    assert roots.of("t", 41) == ChainRoots("model", "float32", 1, rope_trained_len=40).of("t", 41)
    assert roots.of("t", 41) != roots.of("u", 41)
    assert roots.of("t", 41) != roots.of("t", 41, adapter="a")


@given(token_lists, st.integers(1, 9))
def test_chain_is_block_hash_applied_block_by_block(token_ids: list[int], block_size: int) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        expected.append(parent)
    assert chain(ROOT, token_ids, block_size) == expected


@given(token_lists, st.integers(1, 9), st.lists(st.integers(0, 70)))
def test_growing_a_chain_equals_building_it(token_ids: list[int], block_size: int, stops: list[int]) -> None:
    hashes: list[bytes] = []
    for stop in [*sorted(stops), len(token_ids)]:
        extend_chain(hashes, ROOT, token_ids[:stop], block_size)
    assert hashes == chain(ROOT, token_ids, block_size)


@pytest.mark.parametrize("bad", [-1, 2**32, "a"])
def test_ids_outside_u32_are_refused_by_name(bad: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        block_hash(ROOT, [bad])  # type: ignore[list-item]
    assert caught.value.field == "token_ids"


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


LAYOUT = BlockLayout(3, 16, KVFormat("bfloat16", num_kv_heads=2, head_dim=8))


def changed(layout: BlockLayout, **values: object) -> BlockLayout:
    """The layout with other values of its own fields or of its format's."""
    own = {name: values.pop(name) for name in ("num_layers", "block_size") if name in values}
    return replace(layout, **own, format=replace(layout.format, **values))  # type: ignore[arg-type]


def test_sizes_follow_from_the_dimensions() -> None:
    assert LAYOUT.block_bytes == 2 * (2 * 3 * 2 * 16 * 8)
    assert changed(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes
    assert LAYOUT.shape(5) == (5, 3, 2, 2, 2 * 16 * 8)
    assert "bfloat16" in LAYOUT.describe()


@pytest.mark.parametrize(("head_dim", "most"), [(64, 0.54), (80, 0.53), (128, 0.52)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_codes_and_their_scales_take_about_half_of_bf16s_bytes_in_whole_cache_lines(dtype, head_dim, most) -> None:
    wide, narrow = (BlockLayout(3, 16, KVFormat(each, 2, head_dim)) for each in ("bfloat16", dtype))
    assert narrow.format.head_bytes(16) == 16 * head_dim + 16 * 4
    assert narrow.format.head_bytes(16) % 64 == 0
    assert narrow.shape(5) == (5, 3, 2, 2, 16 * head_dim + 64)
    assert narrow.block_bytes / wide.block_bytes <= most
    blocks = -(-2048 // 16)
    assert blocks * narrow.block_bytes <= 0.54 * blocks * wide.block_bytes


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_latents_and_heads_of_broken_words_are_not_kept_as_codes(dtype: str) -> None:
    with pytest.raises(InvalidRequest, match=f"latents are not kept in {dtype}, only in float32") as caught:
        KVFormat(dtype, 1, 576, num_planes=1)
    assert caught.value.field == "dtype"
    with pytest.raises(InvalidRequest, match="heads of 12 bytes") as caught:
        BlockLayout(2, 1, KVFormat(dtype, 2, 8))
    assert caught.value.field == "block_size"


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_dimension_out_of_bounds_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        changed(LAYOUT, **{field: value})
    assert caught.value.field == field


def test_an_unknown_dtype_and_a_block_of_broken_words_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        changed(LAYOUT, dtype="int4")
    assert caught.value.field == "dtype"
    with pytest.raises(InvalidRequest) as caught:
        BlockLayout(1, 1, KVFormat("float16", 1, 1))
    assert caught.value.field == "block_size"


def test_every_differing_field_is_named() -> None:
    LAYOUT.ensure_compatible(replace(LAYOUT))
    with pytest.raises(ModelMismatch, match=r"dtype bfloat16 here, float32 there; head_dim 8 here, 16 there"):
        LAYOUT.ensure_compatible(changed(LAYOUT, head_dim=16, dtype="float32"))
    with pytest.raises(ModelMismatch, match=r"differ: dtype bfloat16 here, int8 there$"):
        LAYOUT.ensure_compatible(changed(LAYOUT, dtype="int8"))
    with pytest.raises(ModelMismatch, match=r"differ: dtype float8_e4m3fn here, int8 there$"):
        changed(LAYOUT, dtype="float8_e4m3fn").ensure_compatible(changed(LAYOUT, dtype="int8"))


@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_a_pair_of_formats_is_one_of_each_side_and_named_by_both(wide: str, codes: str) -> None:
    prefill = BlockLayout(2, 16, KVFormat(wide, 2, 8, sent=codes))
    decode = BlockLayout(2, 16, KVFormat(codes, 2, 8, source=wide))
    assert (prefill.name, decode.name) == (wide, f"{codes}<{wide}")
    assert (prefill.handed_off, decode.computed) == (decode, prefill)
    assert (prefill.computed, decode.handed_off) == (prefill, decode)
    assert decode.block_bytes == BlockLayout(2, 16, KVFormat(codes, 2, 8)).block_bytes
    assert layout_from_proto(layout_to_proto(prefill)) == prefill
    assert layout_from_proto(layout_to_proto(decode)) == decode
    with pytest.raises(ModelMismatch, match=rf"differ: dtype {codes}<{wide} here, {codes} there$"):
        decode.ensure_compatible(BlockLayout(2, 16, KVFormat(codes, 2, 8)))
    with pytest.raises(ModelMismatch, match=rf"differ: block_size 16 here, 32 there; dtype {codes}<{wide} here, "):
        prefill.ensure_compatible(BlockLayout(2, 32, KVFormat(wide, 2, 8)))


@pytest.mark.parametrize(
    ("dtype", "sides"),
    [("float16", {"sent": "int8"}), ("int8", {"source": "float8_e4m3fn"}), ("float32", {"sent": "bfloat16"})],
)
def test_other_pairs_are_refused_with_both_names(dtype: str, sides: dict[str, str]) -> None:
    wide, codes = (dtype, sides["sent"]) if "sent" in sides else (sides["source"], dtype)
    with pytest.raises(InvalidRequest, match=f"in {wide} are not converted to {codes}: keys and values in float32"):
        KVFormat(dtype, 2, 8, **sides)
    with pytest.raises(InvalidRequest, match="latents in float32 are not converted to int8"):
        KVFormat("float32", 1, 8, 1, sent="int8")
