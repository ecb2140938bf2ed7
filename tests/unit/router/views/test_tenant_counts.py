"""How much prefill the fleet did not do: by tenant and place, with labels that clients cannot multiply."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.router.dispatch.record import FINISHED, Ask, RequestRecord
from services.router.dispatch.request import FinishReason
from services.router.views.metrics import MAX_TENANTS, OTHER_TENANTS, RouterMetrics, TenantCounts


@pytest.fixture
def metrics() -> Iterator[RouterMetrics]:
    counting = RouterMetrics("tenant-counts", ["default", "acme"])
    yield counting
    counting.close()


def finish(metrics: RouterMetrics, tenant: str, num_prompt: int, cached: int, fetched: int, peer: int) -> None:
    record = RequestRecord(Ask(f"r-{tenant}", tenant, num_prompt_tokens=num_prompt))
    record.num_cached_tokens, record.num_fetched_tokens, record.num_peer_tokens = cached, fetched, peer
    record.close(FINISHED, FinishReason.LENGTH, 1)
    metrics.ended(record)


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


def test_more_tenants_than_a_page_should_have_share_a_series() -> None:
    names = [f"t{i:04}" for i in range(MAX_TENANTS + 50)]
    counting = RouterMetrics("tenant-counts", names)
    for name in names:
        finish(counting, name, 10, cached=0, fetched=0, peer=0)
    page = counting.page().decode()
    for metric in ("tandem_tenant_requests_total", "tandem_prefix_tokens_total"):
        lines = [line for line in page.splitlines() if line.startswith(metric)]
        assert len({line.split('tenant="')[1].split('"')[0] for line in lines}) == MAX_TENANTS + 1
    assert (
        'tandem_tenant_requests_total{finished="yes",gen_ai_response_model="tenant-counts",tenant="other"} 50' in page
    )
    assert counting.tenants[names[-1]].num_requests == 1
    counting.close()
