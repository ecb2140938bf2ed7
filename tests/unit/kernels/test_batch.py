"""The ragged batch: what its tensors hold, and which lengths it refuses."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.batch import AttentionBatch


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
