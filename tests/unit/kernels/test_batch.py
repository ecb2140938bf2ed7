"""The ragged batch: what its tensors hold, and which lengths it refuses."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.batch import AttentionBatch


def test_from_lists_lays_sequences_one_after_another() -> None:
    batch = AttentionBatch.from_lists([3, 1], [5, 4], [[7, 2], [9]], block_size=4)
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [5, 4]
    assert batch.block_tables.tolist() == [[7, 2], [9, 0]]
    assert batch.slots.tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4, 9 * 4 + 3]
    assert (batch.num_seqs, batch.num_tokens) == (2, 4)


def test_empty_batch_is_allowed() -> None:
    batch = AttentionBatch.from_lists([], [], [], block_size=4)
    assert (batch.num_seqs, batch.num_tokens) == (0, 0)


@pytest.mark.parametrize(("query_lens", "kv_lens"), [([0], [3]), ([4], [3]), ([1], [9])])
def test_lengths_out_of_order_are_refused(query_lens: list[int], kv_lens: list[int]) -> None:
    with pytest.raises(AssertionError):
        AttentionBatch(
            query_start=torch.tensor([0, *query_lens], dtype=torch.int32),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=torch.zeros((1, 2), dtype=torch.int32),
            slots=torch.zeros(sum(query_lens), dtype=torch.int64),
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            block_size=4,
        )
