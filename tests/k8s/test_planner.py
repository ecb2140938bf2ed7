"""The planner against a real API server and controller manager; router and workers are real sessions, Pods stand for
them: the test is their kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import aiohttp.web
import grpc.aio
import pytest

from services.planner.service import PlannerService
from services.planner.settings import PlannerSettings
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from tests.k8s.accounts import planner_rules
from tests.k8s.api_server import ApiServer
from tests.waiting import until


class Router(fleet_pb2_grpc.FleetServiceServicer, inference_pb2_grpc.InferenceServiceServicer):
    """Serves a router's status, drains and metrics page over the real protocols; its figures are the test's to say."""

    def __init__(self) -> None:
        self.workers: dict[str, inference_pb2.WorkerStatus] = {}
        self.rate = 0.0
        """Requests/s that finish; they take `prefill_s` of a prefill worker each."""
        self.prefill_s = 0.5
        self._counts: tuple[float, float] = (0.0, time.monotonic())
        self.num_busy = 0

    def finished(self) -> float:
        """Requests since the start."""
        count, then_s = self._counts
        now_s = time.monotonic()
        self._counts = count + self.rate * (now_s - then_s), now_s
        return self._counts[0]

    async def GetStatus(self, request: Any, context: Any) -> inference_pb2.ClusterStatus:  # noqa: N802
        return inference_pb2.ClusterStatus(workers=self.workers.values())

    async def Drain(self, request: Any, context: Any) -> fleet_pb2.DrainedWorkers:  # noqa: N802
        for name in request.workers:
            self.workers[name].load.draining = True
            self.workers[name].load.num_running = self.num_busy
        return fleet_pb2.DrainedWorkers()

    async def Undrain(self, request: Any, context: Any) -> fleet_pb2.DrainedWorkers:  # noqa: N802
        for name in request.workers:
            self.workers[name].load.draining = False
        return fleet_pb2.DrainedWorkers()

    async def page(self, _: aiohttp.web.Request) -> aiohttp.web.Response:
        """For routers and workers alike."""
        count = self.finished()
        name = "gen_ai_server_time_to_first_token_seconds"
        return aiohttp.web.Response(
            text=f'tandem_requests_total{{outcome="finished"}} {count}\n'
            f"# TYPE {name} histogram\n"
            f'{name}_bucket{{le="1.0"}} {count}\n{name}_bucket{{le="+Inf"}} {count}\n'
            f"{name}_sum {count * self.prefill_s}\n{name}_count {count}\n"
            f"tandem_engine_step_seconds_total {count * self.prefill_s}\n"
        )


@asynccontextmanager
async def served(router: Router) -> AsyncIterator[dict[str, int]]:
    """Its ports by name."""
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(router, server)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    app = aiohttp.web.Application()
    app.router.add_get("/metrics", router.page)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    http_port = site._server.sockets[0].getsockname()[1]
    try:
        yield {"grpc": grpc_port, "http": http_port, "metrics": http_port}
    finally:
        await runner.cleanup()
        await server.stop(0)


class Release:
    """Two Deployments and a router Pod in a namespace of their own, and who plays the kubelet for their Pods."""

    def __init__(self, api: ApiServer, namespace: str, router: Router, ports: dict[str, int]) -> None:
        self.api, self.namespace, self.router, self.ports = api, namespace, router, ports
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self.lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.max_pods = 0

    def install(self) -> None:
        for pool in ("prefill", "decode"):
            labels = {**_labels("worker"), "tandem-llm.io/pool": pool}
            template = {"metadata": {"labels": labels}, "spec": _pod_spec({"metrics": self.ports["metrics"]})}
            self.api.request(
                "POST",
                self.deployments,
                {
                    "metadata": {"name": f"demo-{pool}"},
                    "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
                },
            )
        spec = _pod_spec({"grpc": self.ports["grpc"], "http": self.ports["http"]})
        self.api.request("POST", self.pods, {"metadata": {"name": "router", "labels": _labels("router")}, "spec": spec})

    def allow(self, rules: list[dict[str, Any]]) -> str:
        """A token of a service account with these rights."""
        name = "planner"
        where = f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
        self.api.request("POST", where, {"metadata": {"name": name}})
        roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        self.api.request("POST", f"{roles}/roles", {"metadata": {"name": name}, "rules": rules})
        subject = {"kind": "ServiceAccount", "name": name, "namespace": self.namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        binding = {"metadata": {"name": name}, "subjects": [subject], "roleRef": reference}
        self.api.request("POST", f"{roles}/rolebindings", binding)
        return self.api.token_for(self.namespace, name)

    def work(self) -> None:
        """What kubelets do: Pods get an address and become ready, those that are deleted go."""
        items = self.api.request("GET", self.pods)["items"]
        self.max_pods = max(self.max_pods, sum("tandem-llm.io/pool" in one["metadata"]["labels"] for one in items))
        for gone in self.router.workers.keys() - {pod["metadata"]["name"] for pod in items}:
            del self.router.workers[gone]
        for pod in items:
            with contextlib.suppress(HTTPError):  # 404: a Pod that no node has goes at once, also since it was listed
                self._work_on(pod)

    def _work_on(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if pod["metadata"].get("deletionTimestamp"):
            self.router.workers.pop(name, None)
            self.api.request("DELETE", f"{self.pods}/{name}", {"gracePeriodSeconds": 0})
        elif not pod["status"].get("podIP"):
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600))
            status = {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "podIPs": [{"ip": "127.0.0.1"}],
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
            }
            self.api.request("PATCH", f"{self.pods}/{name}/status", {"status": status})
            pool = pod["metadata"]["labels"].get("tandem-llm.io/pool")
            if pool is not None:
                role = types_pb2.WORKER_ROLE_PREFILL if pool == "prefill" else types_pb2.WORKER_ROLE_DECODE
                load = types_pb2.Load(num_total_blocks=100, num_free_blocks=90)
                self.router.workers[name] = inference_pb2.WorkerStatus(
                    worker=types_pb2.WorkerId(name=name), role=role, connected=True, load=load
                )

    def replicas(self, pool: str) -> int:
        return int(self.api.request("GET", f"{self.deployments}/demo-{pool}")["spec"]["replicas"])

    def events(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.api.request("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return [one for one in items if one["source"].get("component") == "tandem-planner"]

    def named_pods(self, pool: str) -> list[dict[str, Any]]:
        items = self.api.request("GET", f"{self.pods}?labelSelector=tandem-llm.io/pool={pool}")["items"]
        return [one for one in items if not one["metadata"].get("deletionTimestamp")]

    async def until(self, what: Callable[[], bool]) -> None:
        """Plays the kubelet until it is so."""

        async def looked() -> bool:
            await asyncio.to_thread(self.work)
            return await asyncio.to_thread(what)

        await until(looked)


def _labels(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": component}


def _pod_spec(ports: dict[str, int]) -> dict[str, Any]:
    listed = [{"name": name, "containerPort": port} for name, port in ports.items()]
    return {"containers": [{"name": "main", "image": "none", "ports": listed}], "terminationGracePeriodSeconds": 1}


@pytest.fixture
async def release(api_server: ApiServer, namespace: str) -> AsyncIterator[Release]:
    router = Router()
    async with served(router) as ports:
        release = Release(api_server, namespace, router, ports)
        await asyncio.to_thread(release.install)
        await release.until(lambda: len(router.workers) == 2)
        yield release


@asynccontextmanager
async def planner(release: Release, token: str, identity: str = "one", **changes: Any) -> AsyncIterator[PlannerService]:
    kubeconfig: Path = release.api.write_kubeconfig(f"{release.namespace}-{identity}", token, release.namespace)
    settings = PlannerSettings(
        **{
            "release": "demo", "kubeconfig": kubeconfig, "identity": identity, "interval_s": 0.1, "lease_s": 5.0,
            "gpu_budget": 6, "down_window_s": 1.0, "start_s": 0.0, "timeout_s": 20.0, **changes,
        }
    )  # fmt: skip
    hasty = settings.policy().replace(smoothing_s=0.5, direction_s=0.5, cold_start_s=0.0)
    service = PlannerService(settings, hasty)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


async def test_it_scales_both_ways_with_the_charts_rights_drains_first_and_says_why(release: Release):
    token = await asyncio.to_thread(release.allow, planner_rules())
    router = release.router
    async with planner(release, token):
        router.rate = 6.0
        await release.until(lambda: release.replicas("prefill") == 5 and len(release.named_pods("prefill")) == 5)
        router.num_busy = 3  # who is drained has requests still
        router.rate = 0.5
        await release.until(lambda: any(worker.load.draining for worker in router.workers.values()))
        draining = {name for name, worker in router.workers.items() if worker.load.draining}
        for _ in range(5):
            await asyncio.to_thread(release.work)
        assert await asyncio.to_thread(release.replicas, "prefill") == 5
        marked = await asyncio.to_thread(release.named_pods, "prefill")
        costs = {one["metadata"]["name"]: one["metadata"].get("annotations", {}) for one in marked}
        assert all(costs[name]["controller.kubernetes.io/pod-deletion-cost"] == "-1000" for name in draining)
        router.num_busy = 0
        for name in draining:
            router.workers[name].load.num_running = 0
        # Which Pods go is the controller's choice: those of the lowest deletion cost from Kubernetes 1.22 on.
        await release.until(lambda: release.replicas("prefill") < 5 and len(release.named_pods("prefill")) < 5)
    events = await asyncio.to_thread(release.events)
    assert {one["reason"] for one in events} >= {"ScaledUp", "ScaledDown"}
    assert any("req/s keep" in one["message"] for one in events)
    assert release.max_pods <= 6
    held = await asyncio.to_thread(release.api.request, "GET", f"{release.lease}/demo-planner")
    assert held["spec"]["holderIdentity"] in ("", None)


@pytest.mark.slow
async def test_it_stops_at_once_without_its_lease_and_goes_on_when_it_has_it_again(release: Release):
    async with planner(release, release.api.admin_token) as service:
        await release.until(lambda: service.leads and service.state.num_ticks > 2)
        lease = f"{release.lease}/demo-planner"
        taken = {"holderIdentity": "somebody-else", "leaseDurationSeconds": 3}
        await asyncio.to_thread(release.api.request, "PATCH", lease, {"spec": taken})
        await release.until(lambda: not service.leads)
        release.router.rate = 6.0
        ticks = service.state.num_ticks
        before = await asyncio.to_thread(release.replicas, "prefill")
        without: list[int] = []

        def leads_again() -> bool:
            num_ticks = service.state.num_ticks  # before it is asked: those of its new lease do not count
            without.extend([] if service.leads else [num_ticks])
            return service.leads

        await release.until(leads_again)
        assert max(without, default=ticks) - ticks <= 1
        assert before == 1
        await release.until(lambda: release.replicas("prefill") > 1)
        held = await asyncio.to_thread(release.api.request, "GET", lease)
        assert held["spec"]["holderIdentity"] == "one"
        assert held["spec"]["leaseTransitions"] >= 1


@pytest.mark.slow
async def test_of_two_planners_one_leads_and_the_other_follows_it(release: Release):
    token = release.api.admin_token
    async with planner(release, token, "one") as first:
        await release.until(lambda: first.leads)
        async with planner(release, token, "two") as second:
            await release.until(lambda: first.state.num_ticks > 3)
            assert not second.leads
            await first.close()
            await release.until(lambda: second.leads)


@pytest.mark.slow
async def test_a_forbidden_call_is_typed_counted_and_logged_once(release: Release, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    rules = [
        {**rule, "verbs": ["get"]} if rule["resources"] == ["deployments/scale"] else rule for rule in planner_rules()
    ]
    token = await asyncio.to_thread(release.allow, rules)
    async with planner(release, token) as service:
        release.router.rate = 6.0
        await release.until(lambda: service.state.num_failures.get("cluster_forbids", 0) > 5)
        assert await asyncio.to_thread(release.replicas, "prefill") == 1
        assert service.leads
    refusals = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    (refusal,) = [one for one in refusals if "forbids" in one]
    assert "deployments/scale" in refusal


@pytest.mark.slow
async def test_a_dry_run_decides_and_writes_nothing(release: Release, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with planner(release, release.api.admin_token, dry_run=True) as service:
        release.router.rate = 6.0
        await release.until(lambda: service.state.target.prefill > 1)
        assert await asyncio.to_thread(release.replicas, "prefill") == 1
    assert await asyncio.to_thread(release.events) == []
    assert any("dry run: prefill 1 → " in one.getMessage() for one in caplog.records)


@pytest.mark.slow
async def test_an_api_server_that_is_away_changes_nothing_and_ends_nothing(release: Release):
    async with planner(release, release.api.admin_token, timeout_s=2.0) as service:
        await release.until(lambda: service.leads)
        await asyncio.to_thread(release.api.stop)
        await until(lambda: not service.leads and service.state.num_failures)
        await asyncio.to_thread(release.api.start)
        release.router.rate = 6.0
        await release.until(lambda: release.replicas("prefill") > 1)
