"""The chart's ServiceAccounts suffice for what their services ask, with planner and gateway, and grant nothing more."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from services.planner.cluster.calls import ClusterCalls, cluster_calls
from shared.errors import ClusterForbids
from shared.kubernetes.access import ClusterAccess
from shared.kubernetes.pods import Pods
from tests.k8s.accounts import Rights, create_accounts, rights
from tests.k8s.api_server import ApiServer

pytestmark = pytest.mark.slow

POD = {"containers": [{"name": "main", "image": "none"}]}
POOLS = ("demo-decode", "demo-prefill")
PICKER_AND_ROUTER: Rights = [("", "pods", "list", ()), ("", "pods", "watch", ())]
"""A router is its own endpoint picker, which finds the other routers by DNS: a gateway adds no right."""
EXPECTED: dict[str, Rights] = {
    "router": PICKER_AND_ROUTER,
    "worker": [],
    "kvstore": [],
    "redis": [],
    "planner": [
        ("", "events", "create", ()),
        ("", "pods", "list", ()),
        ("", "pods", "patch", ()),
        ("apps", "deployments/scale", "get", POOLS),
        ("apps", "deployments/scale", "patch", POOLS),
        ("coordination.k8s.io", "leases", "create", ()),
        ("coordination.k8s.io", "leases", "get", ("demo-planner",)),
        ("coordination.k8s.io", "leases", "update", ("demo-planner",)),
    ],
}


@pytest.fixture(scope="module")
def release(api_server: ApiServer) -> str:
    """A namespace with the release's accounts, and Deployments without a kubelet."""
    namespace = f"accounts-{secrets.token_hex(4)}"
    api_server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    create_accounts(api_server, namespace)
    for name in (*POOLS, "demo-router"):
        template = {"metadata": {"labels": {"app": name}}, "spec": POD}
        spec = {"replicas": 0, "selector": {"matchLabels": {"app": name}}, "template": template}
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        api_server.request("POST", path, {"metadata": {"name": name}, "spec": spec})
    worker = {"metadata": {"name": "worker"}, "spec": POD}
    api_server.request("POST", f"/api/v1/namespaces/{namespace}/pods", worker)
    return namespace


@pytest.mark.parametrize("component", EXPECTED)
def test_an_account_may_do_this_and_nothing_else(api_server: ApiServer, release: str, component: str):
    found = [(*right, tuple(sorted(names))) for *right, names in rights(api_server, release, f"demo-{component}")]
    assert found == EXPECTED[component]


def access(api: ApiServer, namespace: str, account: str) -> ClusterAccess:
    token = api.token_for(namespace, account)
    return ClusterAccess(namespace, api.write_kubeconfig(f"{namespace}-{account}", token, namespace))


@asynccontextmanager
async def planner(api: ApiServer, namespace: str) -> AsyncIterator[ClusterCalls]:
    given = await asyncio.to_thread(access, api, namespace, "demo-planner")
    async with cluster_calls(given, "demo", 30.0) as calls:
        yield calls


async def test_every_call_of_the_planner_is_allowed(api_server: ApiServer, release: str):
    async with planner(api_server, release) as calls:
        assert await calls.pods() == []  # none has the release's labels
        for pool in ("prefill", "decode"):
            await calls.scale(pool, 2, dry_run=True)
            assert await calls.replicas(pool) == 0
            await calls.scale(pool, 1)
            assert await calls.replicas(pool) == 1
        await calls.mark_victim("worker", 1.0)
        await calls.spare_victim("worker")
        await calls.event("ScaledUp", "a test", about="prefill")
        made = await calls.create_lease("demo-planner", {"holderIdentity": "one", "leaseDurationSeconds": 3})
        await calls.replace_lease({**made, "spec": {**made["spec"], "holderIdentity": "two"}})
        assert (await calls.lease("demo-planner"))["spec"]["holderIdentity"] == "two"


@pytest.mark.parametrize(
    "call",
    [
        lambda calls: calls.scale("router", 0),
        lambda calls: calls.replicas("router"),
        lambda calls: calls.lease("another"),
    ],
    ids=["scale another Deployment", "read its scale", "read another Lease"],
)
async def test_the_planners_rights_end_at_its_own_objects(
    api_server: ApiServer, release: str, call: Callable[[ClusterCalls], Awaitable[object]]
):
    async with planner(api_server, release) as calls:
        with pytest.raises(ClusterForbids):
            await call(calls)


async def test_a_router_lists_and_watches_pods(api_server: ApiServer, release: str):
    given = await asyncio.to_thread(access, api_server, release, "demo-router")
    async with given.connect() as api:
        pods = Pods(api, given, "")
        found, version = await pods.list(10)
        assert "worker" in {pod["metadata"]["name"] for pod in found}
        async for event in pods.watch(version, 5):
            assert event.version == version
            break
