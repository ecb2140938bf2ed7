"""The benchmark of transfers by device pointers moves every block between two processes; over host memory here."""

from __future__ import annotations

import pytest

from loadtest.bench.engine.gpu_direct import rate
from shared.kv.layout import BlockLayout, KVFormat


@pytest.mark.slow
def test_blocks_pass_and_are_checked() -> None:
    layout = BlockLayout(2, 16, KVFormat("float32", num_kv_heads=1, head_dim=8))
    result = rate("cpu", layout, 5, repeats=2)
    assert (result.name, result.unit) == ("5 blocks, directly", "GB/s")
    assert result.value > 0
