"""Discovery by Pods, against a real API server: the contract, every kind of change, and a server that goes away."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.kubernetes_discovery import KubernetesDiscovery
from shared.errors import ClusterUnavailable
from shared.kubernetes.access import ClusterAccess
from shared.kubernetes.pod_watch import Backoff
from shared.kubernetes.pods import Expired, Pods
from tests.k8s.api_server import ApiServer
from tests.k8s.pods import SELECTOR, PodFolder, manifest, status
from tests.unit.router.workers.discovery_contract import (
    D0,
    D1,
    P0,
    Make,
    follow,
    test_nothing_is_read_before_the_start_and_close_twice_is_fine,  # noqa: F401  # run here
    test_the_view_is_there_soon_after_the_start_in_the_order_of_the_source,  # noqa: F401
)

QUICK = Backoff(0.02, 0.2)
LOGGER = "shared.kubernetes.pod_watch"


@pytest.fixture
def pods(api_server: ApiServer, namespace: str) -> PodFolder:
    return PodFolder(api_server, namespace)


@pytest.fixture
def access(api_server: ApiServer, namespace: str) -> ClusterAccess:
    return ClusterAccess.of(namespace, api_server.kubeconfig, "kubeconfig")


@pytest.fixture
def discovery(access: ClusterAccess) -> KubernetesDiscovery:
    return KubernetesDiscovery(access, SELECTOR, backoff=QUICK)


@pytest.fixture
def make(api_server: ApiServer) -> Make:
    def made(workers: Sequence[DiscoveredWorker]) -> KubernetesDiscovery:
        name = f"contract-{secrets.token_hex(4)}"
        api_server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for worker in workers:
            path = f"/api/v1/namespaces/{name}/pods"
            api_server.request("POST", path, manifest(worker))
            api_server.request("PATCH", f"{path}/{worker.name}/status", {"status": status(worker)})
        access = ClusterAccess.of(name, api_server.kubeconfig, "kubeconfig")
        return KubernetesDiscovery(access, SELECTOR, backoff=QUICK)

    return made


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Grows by one with each call of that method of Pods."""
    calls, method = [], getattr(Pods, name)

    def noting(self, *arguments):
        calls.append(name)
        return method(self, *arguments)

    monkeypatch.setattr(Pods, name, noting)
    return calls


async def test_pods_that_come_change_and_go_are_followed(pods, discovery):
    await pods.add(D0)
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [(D0,)])
        await pods.add(P0, ready=False)
        await pods.add(D1)
        await followed.until(lambda: followed.views[1:] == [(D0, D1)])
        await pods.say_ready(P0, True)
        await followed.until(lambda: followed.views[2:] == [(D0, D1, P0)])
        await pods.say_ready(D0, False)
        await followed.until(lambda: followed.views[3:] == [(D1, P0)])
        await pods.remove(D1.name)
        await followed.until(lambda: followed.views[4:] == [(P0,)])
        assert not discovery.failure


@pytest.mark.slow
async def test_a_pod_that_is_being_deleted_is_no_worker_although_it_is_ready(api_server, pods, discovery):
    node = {"metadata": {"name": f"node-of-{pods.namespace}"}}
    await asyncio.to_thread(api_server.request, "POST", "/api/v1/nodes", node)
    bound = manifest(D0)
    bound["spec"]["nodeName"] = node["metadata"]["name"]  # its kubelet has to end it
    await pods.put(bound, status(D0))
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [(D0,)])
        await pods.remove(D0.name)
        await followed.until(lambda: followed.views == [(D0,), ()])
        left = await pods.call("GET", f"/{D0.name}")
        assert left["status"]["conditions"][0]["status"] == "True"
        assert left["metadata"]["deletionTimestamp"]


@pytest.mark.slow
async def test_labels_move_a_worker_and_take_it_out(pods, discovery):
    await pods.add(D0)
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [(D0,)])
        await pods.label("d0", zone="a", rack="r1")
        await followed.until(lambda: followed.views[1:] == [(replace(D0, label=("a", "r1")),)])
        await pods.label("d0", rack=None, **{"nvlink-domain": "n"})
        await followed.until(lambda: followed.views[2:] == [(replace(D0, label=("a", "", "n")),)])
        await pods.label("d0", component="other")
        await followed.until(lambda: followed.views[3:] == [()])
        await pods.label("d0", component="worker", zone=None, **{"nvlink-domain": None})
        await followed.until(lambda: followed.views[4:] == [(D0,)])


@pytest.mark.slow
async def test_a_pod_that_says_no_role_is_left_out_named_and_logged_once(pods, discovery, caplog):
    await pods.add(D0, D1)
    await pods.label("d0", role="prefil")
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [(D1,)])
        await pods.label("d0", zone="a")
        await pods.label("d1", zone="b")
        await followed.until(lambda: len(followed.views) == 2)
        assert discovery.failure.startswith("Kubernetes: Pod d0 is left out: label tandem-llm.io/role is 'prefil'")
        assert [record.name for record in caplog.records if record.levelno == logging.ERROR] == [LOGGER]
        await pods.label("d0", role="decode")
        await followed.until(lambda: len(followed.discovery.workers) == 2)
        assert not discovery.failure


@pytest.mark.slow
async def test_lots_of_pods_come_in_pages(api_server, pods, access):
    many = tuple(replace(D0, name=f"d{number:03}", address=f"10.1.0.{number}:50061") for number in range(60))
    await pods.add(*many)
    discovery = KubernetesDiscovery(access, SELECTOR, page=7, backoff=QUICK)
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [many])
    first = await pods.call("GET", "?limit=7")
    assert first["metadata"]["remainingItemCount"] == 53


@pytest.mark.slow
async def test_a_page_that_the_server_has_forgotten_is_no_part_of_a_list(api_server, pods, access):
    await pods.add(D0, D1, P0)
    async with access.connect() as api:
        listed = Pods(api, access, SELECTOR)
        call = listed._list

        async def call_and_compact(*arguments, **keywords):
            answer = await call(*arguments, **keywords)
            await asyncio.to_thread(api_server.compact)
            return answer

        listed._list = call_and_compact
        with pytest.raises(Expired):
            await listed.list(page=1)
        found, _ = await listed.list(page=3)
        assert [pod["metadata"]["name"] for pod in found] == ["d0", "d1", "p0"]


async def test_the_last_view_stays_while_the_server_is_away_and_what_changed_is_seen_after(
    api_server, pods, discovery, caplog
):
    caplog.set_level(logging.INFO, LOGGER)
    await pods.add(D0, P0)
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [(D0, P0)])
        await asyncio.to_thread(api_server.stop)
        await followed.until(lambda: "does not answer" in discovery.failure)
        assert isinstance(discovery.error, ClusterUnavailable)
        assert (discovery.workers, len(followed.views)) == ((D0, P0), 1)
        await asyncio.to_thread(api_server.start)
        await pods.remove("d0")
        await followed.until(lambda: followed.views[1:] == [(P0,)])
        await followed.until(lambda: not discovery.failure)
        lines = [record.getMessage() for record in caplog.records if "answer" in record.getMessage()]
        assert len(lines) == 2, lines
        assert lines[0].endswith("what is known of 2 Pods stays")


@pytest.mark.slow
async def test_a_version_that_the_server_has_forgotten_is_listed_anew_in_one_change(
    api_server, pods, access, discovery, caplog
):
    caplog.set_level(logging.INFO, LOGGER)
    await pods.add(D0, P0)
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [(D0, P0)])
        await asyncio.to_thread(api_server.stop)
        await asyncio.to_thread(api_server.compact)
        await asyncio.to_thread(api_server.start)
        await followed.until(lambda: "has forgotten version" in caplog.text)
        await pods.remove("d0")
        await pods.add(D1)
        await followed.until(lambda: discovery.workers == (D1, P0))
        assert (D0, P0) not in followed.views[1:]
        assert () not in followed.views


@pytest.mark.slow
async def test_a_watch_that_ends_goes_on_without_a_list(pods, access, monkeypatch):
    lists, watches = counted(monkeypatch, "list"), counted(monkeypatch, "watch")
    await pods.add(D0)
    discovery = KubernetesDiscovery(access, SELECTOR, watch_s=2, backoff=QUICK)
    async with follow(discovery) as followed:
        await followed.until(lambda: followed.views == [(D0,)])
        await followed.until(lambda: len(watches) == 2)  # the server has ended one
        await pods.add(P0)
        await followed.until(lambda: followed.views == [(D0,), (D0, P0)])
        assert not discovery.failure
        assert len(lists) == 1
