"""A whole block is what the senders' slices make of it, and its checksum the sum of theirs, however it is split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.group.own_slices import OwnSlices, SliceForm
from shared.engine.runner.device_link import DeviceLink
from shared.kv.checksum import BlockChecksum
from shared.kv.layout import CODES, BlockLayout, KVFormat
from shared.model.config.model_config import ModelConfig
from shared.model.ranks.block_slices import block_slices, senders
from shared.model.ranks.shard import Degrees
from tests.examples import examples

NUM_BLOCKS = 5


@st.composite
def splits(draw: st.DrawFn) -> tuple[BlockLayout, ModelConfig, Degrees]:
    """Degrees that `Degrees.check` lets pass: one of ranks and KV heads divides the other, a layer a stage at least."""
    tensor = draw(st.integers(1, 8))
    pipeline = draw(st.integers(1, 16 // tensor))
    is_latent = draw(st.booleans())
    divisors = [heads for heads in range(1, 17) if heads % tensor == 0 or tensor % heads == 0]
    num_kv_heads = 1 if is_latent else draw(st.sampled_from(divisors))
    num_layers = draw(st.integers(pipeline, pipeline + 5))
    dtype = draw(st.sampled_from(["float32", "bfloat16", *(() if is_latent else CODES)]))
    form = KVFormat(dtype, num_kv_heads, draw(st.integers(1, 9)), num_planes=1 if is_latent else 2)
    layout = BlockLayout(num_layers, draw(st.sampled_from([16, 32])), form)
    config = SimpleNamespace(num_layers=num_layers, num_kv_heads=num_kv_heads)  # all that slices depend on
    return layout, cast(ModelConfig, config), Degrees(tensor, pipeline)


@examples(150)
@given(split=splits(), ids=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4, unique=True))
def test_slices_make_the_block_again(split: tuple[BlockLayout, ModelConfig, Degrees], ids: list[int]) -> None:
    layout, config, degrees = split
    form = SliceForm(layout, block_slices(config, degrees))
    link = DeviceLink(torch.device("cpu"))
    content = torch.randint(0, 256, (len(ids), layout.block_bytes), dtype=torch.uint8)
    blocks = [form.block(memoryview(bytearray(row.numpy().tobytes()))) for row in content]
    pools, ranks = [], range(degrees.num_ranks)
    for rank in ranks:  # as a leader stores blocks that have arrived
        shape = form.cut(blocks[0], rank).shape
        pool = torch.zeros((NUM_BLOCKS, *shape), dtype=torch.uint8)
        own = OwnSlices(form, rank, pool, link)
        for row, block in zip(own.rows, blocks, strict=False):
            form.write(block, row, rank)
        own.write(ids, own.rows[: len(ids)].clone())
        assert not own.rows[:, form.num_bytes[rank] :].any()
        pools.append(own)
    sending = senders(config, degrees)
    assert sum(form.num_bytes[rank] for rank in sending) == layout.block_bytes, "all of it, and nothing twice"
    assert sending[0] == 0
    for number, expected in enumerate(content):
        made = bytearray(layout.block_bytes)
        for rank in sending:
            form.read(pools[rank].read(ids)[number], form.block(memoryview(made)), rank)
        assert bytes(made) == expected.numpy().tobytes()
    sums = sum(pools[rank].sums(ids) for rank in sending)
    assert isinstance(sums, torch.Tensor)
    whole = BlockChecksum(layout.block_bytes // 8).checksum_blocks(content, range(len(ids)))
    assert [value % (1 << 64) for value in sums.tolist()] == whole
