"""What a Pod says of its worker."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.kubernetes_discovery import worker_of
from shared.errors import ConfigError
from shared.identity import DECODE, PREFILL

READY = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]


def pod(role: str = "decode", ip: str = "10.0.0.1", conditions: Any = READY, **labels: str) -> dict[str, Any]:
    full = {f"tandem-llm.io/{name.replace('_', '-')}": value for name, value in labels.items() if name != "zone"}
    zone = {"topology.kubernetes.io/zone": labels["zone"]} if "zone" in labels else {}
    return {
        "metadata": {"name": "d0", "labels": {"tandem-llm.io/role": role, **zone, **full}},
        "spec": {
            "containers": [
                {"name": "proxy", "ports": [{"containerPort": 80}]},
                {"name": "logs"},
                {"name": "worker", "ports": [{"name": "metrics", "containerPort": 1}, SESSION]},
            ]
        },
        "status": {"podIP": ip, "conditions": conditions},
    }


SESSION = {"name": "session", "containerPort": 50061}


@pytest.mark.parametrize(
    ("role", "expected"),
    [("prefill", PREFILL), ("decode", DECODE), ("collocated", DECODE)],
)
def test_role_name_and_address(role, expected):
    assert worker_of(pod(role)) == DiscoveredWorker("d0", expected, "10.0.0.1:50061")
    assert worker_of(pod(role, ip="fd00::1")) == DiscoveredWorker("d0", expected, "[fd00::1]:50061")


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({}, ()),
        ({"zone": "a"}, ("a",)),
        ({"zone": "a", "rack": "r", "nvlink_domain": "n"}, ("a", "r", "n")),
        ({"zone": "a", "nvlink_domain": "n"}, ("a", "", "n")),
        ({"rack": "r"}, ("", "r")),
    ],
)
def test_where_it_stands_keeps_the_order_of_its_parts(labels, place):
    worker = worker_of(pod(**labels))
    assert worker is not None
    assert worker.label == place


@pytest.mark.parametrize(
    "status", [{}, {"podIP": "10.0.0.1"}, {"conditions": READY}, {"podIP": "", "conditions": READY}]
)
def test_a_pod_without_address_or_readiness_is_no_worker(status):
    assert worker_of({**pod(), "status": status}) is None
    assert worker_of({**pod("nonsense"), "status": status}) is None


def test_a_pod_that_is_not_ready_or_is_ending_is_no_worker():
    assert worker_of(pod(conditions=[{"type": "Ready", "status": "False"}])) is None
    ending = pod()
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert worker_of(ending) is None


def test_a_ready_pod_that_says_something_wrong_is_refused_by_what_is_wrong():
    with pytest.raises(ConfigError, match=r"label tandem-llm\.io/role is 'router', not one of prefill, decode"):
        worker_of(pod("router"))
    with pytest.raises(ConfigError, match="in collocated mode the decode workers prefill"):
        worker_of(pod("prefill"), collocated=True)
    without = pod()
    without["spec"]["containers"].pop()
    with pytest.raises(ConfigError, match="no container has a port named 'session'"):
        worker_of(without)
