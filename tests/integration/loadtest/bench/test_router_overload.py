"""A router process at three times what its workers can do: goodput stays, 429s come at once, memory stands still."""

from __future__ import annotations

import pytest

from loadtest.bench.router.overload import measure, results


@pytest.mark.slow
@pytest.mark.timing
async def test_an_overloaded_router_refuses_at_once_and_its_memory_stands_still():
    full, over = await measure(capacity_s=5.0, overload_s=20.0)
    assert over.goodput >= 0.9 * full.goodput
    assert len(over.refusals_s) > 1000
    assert over.refused_at_once >= 0.99
    assert over.growth_bytes < 8 << 20
    assert all(result.value >= 0 or "growth" in result.name for result in results(full, over))
