"""Metrics defined as data: what they are called, and what the Prometheus page makes of them."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request

import pytest

from services.kvstore.metrics import METRICS as KVSTORE_METRICS
from services.kvstore.metrics import NODE_METRICS
from services.router.views.observed import METRICS as ROUTER_METRICS
from services.worker.telemetry.metrics import METRICS as WORKER_METRICS
from shared.errors import ConfigError
from shared.telemetry.metrics import Kind, Metrics, Observed, counter, gauge, histogram
from shared.telemetry.metrics_server import MetricsServer

OBSERVED = (
    Observed(gauge("tandem_depth_blocks", "How deep."), lambda source: source["depth"]),
    Observed(counter("tandem_moved_bytes_total", "What moved.", "way"), lambda source: source["moved"]),
)

SERVICES = {
    "router": ROUTER_METRICS,
    "worker": tuple(item.metric for item in WORKER_METRICS),
    "kvstore": tuple(item.metric for item in (*KVSTORE_METRICS, *NODE_METRICS)),
}


def samples(page: str) -> dict[str, float]:
    lines = (line for line in page.splitlines() if line.startswith(("tandem_", "gen_ai_", "target_info")))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


@pytest.mark.parametrize("service", SERVICES)
def test_names_follow_the_conventions_and_each_says_what_it_is(service: str) -> None:
    metrics = SERVICES[service]
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert re.fullmatch(r"tandem_[a-z_]+|gen_ai\.[a-z_.]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.help.endswith(".")


def test_values_are_read_when_the_page_is_made() -> None:
    source = {"depth": 3, "moved": {"in": 10, "out": 0}}
    metrics = Metrics("tandem-test", "t-0", {"model": "demo"})
    metrics.observe(OBSERVED, source)
    first = metrics.page().decode()
    assert "# HELP tandem_depth_blocks How deep.\n# TYPE tandem_depth_blocks gauge\n" in first
    assert "# HELP tandem_moved_bytes_total What moved.\n# TYPE tandem_moved_bytes_total counter\n" in first
    source["depth"], source["moved"] = 2, {"in": 15, "out": 1}
    found = samples(metrics.page().decode())
    assert found['tandem_depth_blocks{model="demo"}'] == 2
    assert found['tandem_moved_bytes_total{model="demo",way="in"}'] == 15
    assert found['tandem_moved_bytes_total{model="demo",way="out"}'] == 1
    metrics.close()
    metrics.close()


def test_the_page_names_its_service_and_has_no_labels_of_the_library() -> None:
    metrics = Metrics("tandem-test", "t-0")
    wait = metrics.histogram(histogram("gen_ai.wait", "Waiting.", (0.5, 1.0), "who", unit="s"))
    wait.record(0.7, "me")
    wait.record(1.0, "me")
    page = metrics.page().decode()
    (info,) = (name for name in samples(page) if name.startswith("target_info"))
    assert 'service_name="tandem-test"' in info
    assert 'service_instance_id="t-0"' in info
    assert "otel_scope" not in page
    found = samples(page)
    bounds = ("0.5", "1.0", "+Inf")
    assert [found[f'gen_ai_wait_seconds_bucket{{le="{bound}",who="me"}}'] for bound in bounds] == [0, 2, 2]
    assert (found['gen_ai_wait_seconds_count{who="me"}'], found['gen_ai_wait_seconds_sum{who="me"}']) == (2, 1.7)
    metrics.close()


def test_two_sets_of_metrics_do_not_mix() -> None:
    first, second = Metrics("tandem-a"), Metrics("tandem-b")
    first.counter(counter("tandem_things_total", "Things.")).add(1)
    assert "tandem_things_total" not in second.page().decode()
    first.close()
    second.close()


async def test_a_process_without_http_serves_the_page_from_threads_of_its_own() -> None:
    metrics = Metrics("tandem-test")
    metrics.observe(OBSERVED, {"depth": 4, "moved": {}})
    server = MetricsServer("127.0.0.1:0", metrics.registry, lambda: "")
    await server.start()
    page = await asyncio.to_thread(get, server.address)
    assert samples(page)["tandem_depth_blocks"] == 4
    taken = MetricsServer(server.address, metrics.registry, lambda: "")
    with pytest.raises(ConfigError, match="metrics") as error:
        await taken.start()
    assert error.value.field == "metrics"
    server.close()
    server.close()
    await asyncio.to_thread(closed, server.address)
    metrics.close()


def closed(address: str) -> None:
    """Returns once nobody listens there."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError:
            return


async def test_no_address_means_no_server_and_a_bad_one_is_refused() -> None:
    metrics = Metrics("tandem-test")
    server = MetricsServer("", metrics.registry, lambda: "")
    await server.start()
    assert server.address == ""
    server.close()
    for bad in ("9464", "host:", ":1", "host:70000"):
        with pytest.raises(ConfigError, match="host:port"):
            MetricsServer(bad, metrics.registry, lambda: "")
    metrics.close()
