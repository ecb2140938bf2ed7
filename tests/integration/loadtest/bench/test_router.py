"""The router's benchmark, in small: a real router between scripted workers and clients."""

from __future__ import annotations

import pytest

from loadtest.bench.router.measure import fan_out, latency


@pytest.mark.slow
async def test_the_routers_latency_and_fan_out_are_measured() -> None:
    added = {result.name: result.value for result in await latency(8, 20.0, 1.0, "load")}
    assert 0 < added["load: latency added p50"] <= added["load: latency added p99"]
    assert added["load: router's processor time a request"] > 0
    passed_on, a_message, of_a_core = await fan_out(4, 200.0, 1.0, num_clients=1)
    assert passed_on.value > 0
    assert a_message.value >= 1
    assert of_a_core.value > 0
