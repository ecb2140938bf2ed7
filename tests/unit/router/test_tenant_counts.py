"""How much prefill the fleet did not do: by tenant and place, with labels that clients cannot multiply."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.write_coalescer import WriteCoalescer
from services.router.metrics import OTHER_TENANTS, RouterMetrics, TenantCounts
from services.router.request import Request
from shared.engine.sampling_params import SamplingParams


@pytest.fixture
def metrics() -> Iterator[RouterMetrics]:
    counting = RouterMetrics("tenant-counts", ["default", "acme"])
    yield counting
    counting.close()


def finish(metrics: RouterMetrics, tenant: str, num_prompt: int, cached: int, fetched: int, peer: int) -> None:
    params = SamplingParams(max_tokens=1, seed=1)
    active = ActiveRequest(Request(f"r-{tenant}", tuple(range(num_prompt)), params, tenant), WriteCoalescer())
    active.summary.num_cached_tokens = cached
    active.summary.num_fetched_tokens = fetched
    active.summary.num_peer_tokens = peer
    metrics.finished(active)


def test_tokens_are_counted_by_tenant_and_place(metrics: RouterMetrics) -> None:
    finish(metrics, "acme", 100, cached=64, fetched=48, peer=16)
    finish(metrics, "acme", 10, cached=0, fetched=0, peer=0)
    assert metrics.tenants["acme"] == TenantCounts(2, 110, 16, 16, 32)
    page = metrics.page().decode()
    lines = [line for line in page.splitlines() if line.startswith("tandem_prefix_tokens") and "acme" in line]
    values = {line.split('place="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
    assert values == {"local": 16.0, "peer": 16.0, "store": 32.0, "computed": 46.0}


def test_names_that_clients_made_up_are_counted_together(metrics: RouterMetrics) -> None:
    for number in range(50):
        finish(metrics, f"made-up-{number}", 10, cached=5, fetched=0, peer=0)
    assert metrics.tenants[OTHER_TENANTS] == TenantCounts(50, 500, 250, 0, 0)
    assert set(metrics.tenants) == {"default", "acme", OTHER_TENANTS}
    assert "made-up" not in metrics.page().decode()
