"""The two probes that stand beside the metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from shared.telemetry import metrics_server
from shared.telemetry.metrics import Metrics
from shared.telemetry.metrics_server import MetricsServer


@dataclass
class Probed:
    server: MetricsServer
    reason: str = ""


@pytest.fixture
async def probed() -> AsyncIterator[Probed]:
    metrics = Metrics("tandem-test")
    found: Probed
    server = MetricsServer("127.0.0.1:0", metrics.registry, lambda: found.reason)
    found = Probed(server)
    await server.start()
    yield found
    server.close()
    metrics.close()


def get(server: MetricsServer, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def test_ready_is_what_the_service_says_at_that_moment(probed: Probed) -> None:
    assert await asyncio.to_thread(get, probed.server, "/readyz") == (200, {"ready": True, "reason": ""})
    probed.reason = "draining"
    assert await asyncio.to_thread(get, probed.server, "/readyz") == (503, {"ready": False, "reason": "draining"})


async def test_a_service_that_is_not_ready_is_alive(probed: Probed) -> None:
    probed.reason = "Redis does not answer"
    assert await asyncio.to_thread(get, probed.server, "/healthz") == (200, {"status": "ok"})


async def test_an_event_loop_that_runs_nothing_is_not_alive(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "HEALTH_TIMEOUT_S", 0.05)
    answers: list[tuple[int, dict[str, object]]] = []
    asking = threading.Thread(target=lambda: answers.append(get(probed.server, "/healthz")))
    asking.start()
    asking.join()  # the event loop waits here meanwhile
    assert answers == [(503, {"status": "the event loop ran nothing for 0.05 s"})]
