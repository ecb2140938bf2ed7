"""Workers that are Pods of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from services.router.workers.discovery import DiscoveredWorker
from shared.address import Address
from shared.errors import ClusterUnavailable, ConfigError
from shared.identity import BOTH, DECODE, PREFILL
from shared.kubernetes.access import ClusterAccess
from shared.kubernetes.pod_fields import named_ports, ready_condition
from shared.kubernetes.pod_watch import PAGE, WATCH_S, Backoff, PodWatch

ROLE_LABEL = "tandem-llm.io/role"
PORT = "session"
"""Name of the container port that the worker serves sessions on."""
TOPOLOGY_LABELS = ("topology.kubernetes.io/zone", "tandem-llm.io/rack", "tandem-llm.io/nvlink-domain")
"""Labels of a Pod's place, widest first."""
ROLES = {"prefill": PREFILL, "decode": DECODE, "collocated": DECODE, "auto": BOTH}
"""A collocated worker is a decode worker that computes its own prompts; one of auto hands over too."""


def worker_of(pod: Mapping[str, Any], *, collocated: bool = False) -> DiscoveredWorker | None:
    """The worker, named as the Pod; None while the Pod is not ready or is being deleted.

    Raises ConfigError for a ready Pod whose labels or ports do not say what they should. `collocated`: a prefill worker
    is wrong.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    address = status.get("podIP")
    if metadata.get("deletionTimestamp") or not address or ready_condition(pod) is None:
        return None
    labels = metadata.get("labels") or {}
    role = labels.get(ROLE_LABEL, "")
    if role not in ROLES:
        raise ConfigError(f"label {ROLE_LABEL} is {role!r}, not one of {', '.join(ROLES)}", field=ROLE_LABEL)
    if collocated and ROLES[role] == PREFILL:
        raise ConfigError("it is a prefill worker: in collocated mode the decode workers prefill", field=ROLE_LABEL)
    return DiscoveredWorker(metadata["name"], ROLES[role], str(Address(address, _port(pod))), _place(labels))


def _port(pod: Mapping[str, Any]) -> int:
    port = named_ports(pod).get(PORT)
    if port is None:
        raise ConfigError(f"no container has a port named {PORT!r}", field="ports")
    return port


def _place(labels: Mapping[str, str]) -> tuple[str, ...]:
    """A part that is not known between two that are is empty, so that the narrower ones still count."""
    parts = [labels.get(label, "") for label in TOPOLOGY_LABELS]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


class KubernetesDiscovery:
    """Implements `Discovery`: the ready Pods that a label selector names, by name."""

    def __init__(
        self,
        access: ClusterAccess,
        selector: str,
        *,
        collocated: bool = False,
        page: int = PAGE,
        watch_s: int = WATCH_S,
        backoff: Backoff | None = None,
    ) -> None:
        """`collocated`: a Pod with a prefill worker is wrong. Asks nothing yet."""
        self._pods = PodWatch(
            access, selector, partial(worker_of, collocated=collocated), page=page, watch_s=watch_s, backoff=backoff
        )
        self._workers: tuple[DiscoveredWorker, ...] = ()

    @property
    def workers(self) -> tuple[DiscoveredWorker, ...]:
        """The workers whose Pods were ready by the API server's last report."""
        return self._workers

    @property
    def failure(self) -> str:
        """Why the Pods cannot be listed, or which of them are wrong."""
        return f"Kubernetes: {self._pods.failure}" if self._pods.failure else ""

    @property
    def error(self) -> ClusterUnavailable | None:
        """ClusterForbids or ClusterUnavailable, while the API server does not list the Pods."""
        return self._pods.error

    def start(self, on_change: Callable[[], None]) -> None:
        """Begins to list and watch."""

        def follow() -> None:
            self._workers = tuple(worker for _, worker in sorted(self._pods.view.items()))
            on_change()

        self._pods.start(follow)

    async def close(self) -> None:
        """Ends the watch."""
        await self._pods.close()
