"""The transfer benchmark, in small: two processes, every kind of hand-off whole and undamaged."""

from __future__ import annotations

import pytest

from loadtest.bench.transfer.measure import KINDS, measure
from shared.kv.encryption import CLASSES


@pytest.mark.slow
async def test_every_kind_of_hand_off_is_measured() -> None:
    results = {result.name: result for result in await measure([(20, 8 << 10)], repeats=2)}
    passes = ["memcpy", "checksum", "tag"]
    passes += [f"{work}, {name}" for work in ("encrypt", "memcpy and decrypt") for name in CLASSES]
    assert set(results) == {f"20 x 8 KiB: {kind}" for kind in KINDS} | {f"8 KiB: {name}" for name in passes}
    assert all(result.value > 0 for result in results.values())
