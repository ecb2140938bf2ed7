"""Pods without processes: what discovery reads is written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.kubernetes_discovery import ROLE_LABEL, TOPOLOGY_LABELS
from shared.address import Address
from shared.identity import roles_text
from tests.k8s.api_server import ApiServer

LABEL = "app.kubernetes.io/component"
SELECTOR = f"{LABEL}=worker"


def manifest(worker: DiscoveredWorker, **labels: str) -> dict[str, Any]:
    """The Pod of a worker."""
    port = {"name": "session", "containerPort": Address.parse(worker.address, "address").port}
    place = {label: part for label, part in zip(TOPOLOGY_LABELS, worker.label, strict=False) if part}
    return {
        "metadata": {
            "name": worker.name,
            "labels": {LABEL: "worker", ROLE_LABEL: roles_text(worker.roles), **place, **labels},
        },
        "spec": {"containers": [{"name": "worker", "image": "none", "ports": [port]}]},
    }


def status(worker: DiscoveredWorker, ready: bool = True) -> dict[str, Any]:
    """The status that a kubelet writes."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"phase": "Running", "podIP": Address.parse(worker.address, "address").host, "conditions": conditions}


class PodFolder:
    """The Pods of one namespace, changed by hand."""

    def __init__(self, api_server: ApiServer, namespace: str) -> None:
        self.api_server = api_server
        self.namespace = namespace
        self.path = f"/api/v1/namespaces/{namespace}/pods"

    async def add(self, *workers: DiscoveredWorker, ready: bool = True) -> None:
        """Creates their Pods, ready or not yet."""
        for worker in workers:
            await self.put(manifest(worker), status(worker, ready))

    async def put(self, pod: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Creates a Pod with this status."""
        await self.call("POST", "", pod)
        await self.call("PATCH", f"/{pod['metadata']['name']}/status", {"status": state})

    async def say_ready(self, worker: DiscoveredWorker, ready: bool) -> None:
        """Its readiness probe succeeds, or fails."""
        await self.call("PATCH", f"/{worker.name}/status", {"status": status(worker, ready)})

    async def label(self, name: str, **labels: str | None) -> None:
        """Sets labels by their last part (role, rack, zone); None removes one."""
        full = {label.rpartition("/")[2]: label for label in (LABEL, ROLE_LABEL, *TOPOLOGY_LABELS)}
        await self.call(
            "PATCH", f"/{name}", {"metadata": {"labels": {full[key]: value for key, value in labels.items()}}}
        )

    async def remove(self, name: str) -> None:
        """Deletes the Pod; one that no Node has taken is gone at once."""
        await self.call("DELETE", f"/{name}")

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """One call as the admin below the namespace's Pods."""
        return await asyncio.to_thread(self.api_server.request, method, self.path + path, body)
