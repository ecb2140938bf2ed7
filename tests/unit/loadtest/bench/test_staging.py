"""The benchmark of staging moves every block, over host memory here."""

from __future__ import annotations

import torch

from loadtest.bench.engine.staging import rates
from shared.kv.layout import BlockLayout, KVFormat


def test_both_ways_have_a_rate() -> None:
    layout = BlockLayout(2, 16, KVFormat("float32", num_kv_heads=1, head_dim=8))
    results = rates(torch.device("cpu"), layout, 5, repeats=2)
    assert [result.name for result in results] == ["5 blocks, sent", "5 blocks, received"]
    assert all(result.value > 0 for result in results)
