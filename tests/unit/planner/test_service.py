"""The planner's process: what it says of failures, and that it announces what the server has accepted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.planner import service
from services.planner.cluster.pods import Pod
from services.planner.figures.page import Page
from services.planner.figures.sources import RouterFigures
from services.planner.service import PlannerService
from services.planner.settings import PlannerSettings
from shared.errors import ClusterUnavailable, TandemError, WorkerLost
from shared.kubernetes.access import ClusterAccess
from shared.rpc.pb.tandem.v1 import inference_pb2
from tests.waiting import until

KUBECONFIG = """\
{"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "current-context": "c",
"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u", "user": {}}]}
"""


class Cluster:
    """In the place of the API server, the routers and the workers. Each part fails while it has an error."""

    def __init__(self) -> None:
        self.holder = ""
        self.num_looks = 0
        self.lease_error: Exception | None = None
        self.scale_error: Exception | None = None
        self.page_error: TandemError | None = None
        self.replicas_now = {"prefill": 3, "decode": 3}
        self.events: list[tuple[str, str]] = []

    async def lease(self, name: str) -> dict[str, Any]:
        self.num_looks += 1
        if self.lease_error is not None:
            raise self.lease_error
        return {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {"holderIdentity": self.holder}}

    async def replace_lease(self, lease: dict[str, Any]) -> None:
        self.holder = lease["spec"]["holderIdentity"]

    async def pods(self) -> list[Pod]:
        return []

    async def replicas(self, pool: str) -> int:
        return self.replicas_now[pool]

    async def scale(self, pool: str, replicas: int, *, dry_run: bool = False) -> None:
        if self.scale_error is not None:
            raise self.scale_error
        self.replicas_now[pool] = self.replicas_now[pool] if dry_run else replicas

    async def event(self, reason: str, message: str, *, about: str) -> None:
        self.events.append((reason, about))

    async def routers(self, pods: Sequence[Pod]) -> list[RouterFigures]:
        return [RouterFigures("router", Page(), inference_pb2.ClusterStatus())]

    async def pages(self, pods: Sequence[Pod]) -> dict[str, Page]:
        if self.page_error is not None:
            raise self.page_error
        return {}

    async def close(self) -> None:
        pass


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def planner(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[PlannerService]:
    """Not started; its budget is a worker less than the cluster has in each pool."""

    @asynccontextmanager
    async def calls(access: ClusterAccess, release: str, timeout_s: float) -> AsyncIterator[Cluster]:
        yield cluster

    monkeypatch.setattr(service, "cluster_calls", calls)
    monkeypatch.setattr(service, "Sources", lambda *_: cluster)
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    settings = PlannerSettings(
        release="demo", kubeconfig=tmp_path / "kubeconfig", interval_s=0.05, lease_s=1.0, gpu_budget=4
    )
    made = PlannerService(settings)
    yield made
    await made.close()


async def ticks(planner: PlannerService, count: int = 3) -> None:
    """Waits until that many ticks have ended that began after this call."""
    before = planner.state.num_ticks
    await until(lambda: planner.state.num_ticks > before + count)


async def test_it_is_failing_while_a_worker_does_not_answer_and_says_so_once(
    cluster: Cluster, planner: PlannerService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, service.__name__)
    cluster.page_error = WorkerLost("p0 does not answer")
    await planner.start()
    await ticks(planner)
    assert planner.state.failing
    said = [record.getMessage() for record in caplog.records if record.name == service.__name__]
    assert sum("p0 does not answer" in text for text in said) == 1
    assert not any("answers again" in text for text in said)
    cluster.page_error = None
    await until(lambda: not planner.state.failing)
    assert "all that the planner reads answers again" in caplog.text


async def test_one_that_waits_for_the_lease_is_failing_only_while_that_does_not_answer(
    cluster: Cluster, planner: PlannerService
) -> None:
    cluster.holder, cluster.lease_error = "another", ClusterUnavailable("away")
    await planner.start()
    await until(lambda: planner.state.failing)
    cluster.lease_error = None
    await until(lambda: not planner.state.failing)
    assert not planner.leads


async def test_a_leaders_lease_says_nothing_of_what_else_fails(cluster: Cluster, planner: PlannerService) -> None:
    cluster.page_error = WorkerLost("p0 does not answer")
    await planner.start()
    await until(lambda: planner.state.failing)
    looks = cluster.num_looks

    def renewed() -> bool:
        assert planner.state.failing
        return cluster.num_looks > looks + 2

    await until(renewed)


async def test_what_the_server_refuses_is_not_announced(cluster: Cluster, planner: PlannerService) -> None:
    cluster.scale_error = ClusterUnavailable("the server answers 422: too few")
    await planner.start()
    await ticks(planner)
    assert planner.state.num_failures["cluster_unavailable"] >= 3
    assert (cluster.events, planner.state.num_changes) == ([], {})
    cluster.scale_error = None
    await until(lambda: cluster.replicas_now == {"prefill": 2, "decode": 2})
    assert cluster.events == [("ScaledDown", "prefill"), ("ScaledDown", "decode")]
    assert planner.state.num_changes == {"prefill": 1, "decode": 1}
