"""Batches over latents are cut by length, and into single tokens, from what the device has already."""

from __future__ import annotations

import torch

from shared.kernels.batch import AttentionBatch
from shared.model.layers.latent_attention_block import split_by_length

LENS, KV_LENS = (1, 40, 3, 33, 1), (9, 70, 20, 33, 1)
TABLES = [[4], [9, 1, 2, 3, 8], [5, 6], [20, 21, 22], [7]]


def assert_same(batch: AttentionBatch, expected: AttentionBatch) -> None:
    assert (batch.query_lens, batch.kv_lens) == (expected.query_lens, expected.kv_lens)
    assert torch.equal(batch.query_start, expected.query_start)
    assert torch.equal(batch.seq_lens, expected.seq_lens)
    assert torch.equal(batch.slots, expected.slots)
    width = expected.block_tables.shape[1]
    assert torch.equal(batch.block_tables[:, :width], expected.block_tables)


def test_short_queries_stay_together_and_each_long_one_has_a_pool_of_its_own() -> None:
    batch = AttentionBatch.from_lists(LENS, KV_LENS, TABLES, 16)
    parts = split_by_length(batch, 32)
    assert parts.short is not None
    assert_same(parts.short, AttentionBatch.from_lists((1, 3, 1), (9, 20, 1), [TABLES[0], TABLES[2], TABLES[4]], 16))
    assert parts.short_rows.tolist() == [0, 41, 42, 43, 77]
    for chunk, (rows, query_len, kv_len, table) in zip(
        parts.long, [(slice(1, 41), 40, 70, TABLES[1]), (slice(44, 77), 33, 33, TABLES[3])], strict=True
    ):
        assert (chunk.rows, chunk.table.tolist()) == (rows, table)
        assert_same(chunk.batch, AttentionBatch.from_lists([query_len], [kv_len], [list(range(len(table)))], 16))


def test_without_short_queries_there_is_no_batch_of_them() -> None:
    parts = split_by_length(AttentionBatch.from_lists((40,), (40,), [[0, 1, 2]], 16), 32)
    assert parts.short is None
    assert parts.short_rows.tolist() == []
