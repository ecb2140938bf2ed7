"""The planner's calls to the Kubernetes API server: few, on plain JSON, with typed errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import ApiClient

from services.planner.cluster.pods import (
    COMPONENT,
    DELETION_COST,
    DRAINED_SINCE,
    FIRST_VICTIM_COST,
    INSTANCE,
    VICTIM_COST,
    Pod,
    pod_of,
)
from shared.errors import ClusterUnavailable
from shared.kubernetes.access import ClusterAccess, refusal, status_message, typed_errors

Json = dict[str, Any]

_MERGE_PATCH = "application/merge-patch+json"


class Conflict(Exception):
    """409: another client changed the object, or made it, in between."""


class Absent(ClusterUnavailable):
    """404: there is no such object."""


class ClusterCalls:
    """The release's objects in one namespace.

    All calls raise ClusterForbids (401, 403), Absent, Conflict, and ClusterUnavailable for everything else that goes
    wrong. Each ends within `timeout_s`.
    """

    def __init__(self, api: ApiClient, namespace: str, release: str, timeout_s: float) -> None:
        """`api` is open; it is not closed here."""
        self._api = api
        self._namespace = namespace
        self._release = release
        self._timeout_s = timeout_s

    async def pods(self) -> list[Pod]:
        """Workers and routers of the release that have not ended."""
        selector = f"{INSTANCE}={self._release},{COMPONENT} in (worker,router)"
        answer = await self._call(
            "GET", f"/api/v1/namespaces/{self._namespace}/pods", query={"labelSelector": selector}
        )
        return [pod for item in answer["items"] if (pod := pod_of(item)) is not None]

    async def replicas(self, pool: str) -> int:
        """Number of replicas in the spec of the pool's Deployment."""
        answer = await self._call("GET", self._scale(pool))
        return int(answer["spec"].get("replicas", 0))

    async def scale(self, pool: str, replicas: int, *, dry_run: bool = False) -> None:
        """Asks the pool's Deployment for that many Pods. `dry_run`: the server checks, and changes nothing."""
        body = {"spec": {"replicas": replicas}}
        await self._call("PATCH", self._scale(pool), body, {"dryRun": "All"} if dry_run else {})

    async def mark_victim(self, pod: str, since_s: float) -> None:
        """The Pod goes before those without a mark when its Deployment shrinks."""
        await self._annotate(pod, {DELETION_COST: VICTIM_COST, DRAINED_SINCE: f"{since_s:.3f}"})

    async def mark_first_victim(self, pod: str) -> None:
        """A marked Pod goes before the other marked ones: they still have work."""
        await self._annotate(pod, {DELETION_COST: FIRST_VICTIM_COST})

    async def spare_victim(self, pod: str) -> None:
        """Takes that back."""
        await self._annotate(pod, {DELETION_COST: None, DRAINED_SINCE: None})

    async def event(self, reason: str, message: str, *, warning: bool = False, about: str) -> None:
        """Writes an Event about the Deployment of the pool `about`."""
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        deployment = f"{self._release}-{about}"
        body = {
            "metadata": {"generateName": f"{self._release}-planner-", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": "apps/v1", "kind": "Deployment", "name": deployment, "namespace": self._namespace,
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "source": {"component": "tandem-planner"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }  # fmt: skip
        await self._call("POST", f"/api/v1/namespaces/{self._namespace}/events", body)

    async def lease(self, name: str) -> Json:
        """Raises Absent."""
        return await self._call("GET", f"{self._leases}/{name}")

    async def create_lease(self, name: str, spec: Mapping[str, Any]) -> Json:
        """Raises Conflict where there is one."""
        return await self._call("POST", self._leases, {"metadata": {"name": name}, "spec": spec})

    async def replace_lease(self, lease: Json) -> Json:
        """Raises Conflict where it has changed since it was read."""
        return await self._call("PUT", f"{self._leases}/{lease['metadata']['name']}", lease)

    @property
    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    def _scale(self, pool: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{self._release}-{pool}/scale"

    async def _annotate(self, pod: str, notes: Mapping[str, str | None]) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod}"
        await self._call("PATCH", path, {"metadata": {"annotations": notes}})

    async def _call(self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None) -> Json:
        kind = _MERGE_PATCH if method == "PATCH" else "application/json"
        with typed_errors():
            call = await self._api.param_serialize(
                method, path, query_params=list((query or {}).items()), body=body,
                header_params={"Accept": "application/json", "Content-Type": kind}, auth_settings=["BearerToken"],
            )  # fmt: skip
            answer = await self._api.call_api(*call, _request_timeout=self._timeout_s, _preload_content=False)
            async with answer.response as response:
                content = await response.read()
            if 200 <= response.status < 300:
                parsed: Json = json.loads(content)
                return parsed
        raise _failure(method, path, response.status, content)


@asynccontextmanager
async def cluster_calls(access: ClusterAccess, release: str, timeout_s: float) -> AsyncIterator[ClusterCalls]:
    """The calls over a connection of their own."""
    async with access.connect() as api:
        yield ClusterCalls(api, access.namespace, release, timeout_s)


def _failure(method: str, path: str, status: int, content: bytes) -> Exception:
    if status == 404:
        return Absent(f"the Kubernetes API server does not know it: {status_message(content)}", status=status)
    if status == 409:
        return Conflict(status_message(content))
    return refusal(status, content, f"{method} {path}")
