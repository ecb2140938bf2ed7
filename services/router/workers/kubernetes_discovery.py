"""Workers that are Pods of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.pod_worker import worker_of
from shared.errors import ClusterUnavailable
from shared.kubernetes.access import ClusterAccess
from shared.kubernetes.pod_watch import PAGE, WATCH_S, Backoff, PodWatch


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
        """Those whose Pods were ready when the API server last told us."""
        return self._workers

    @property
    def failure(self) -> str:
        """Why the API server does not tell us, or which Pods are wrong."""
        return f"Kubernetes: {self._pods.failure}" if self._pods.failure else ""

    @property
    def error(self) -> ClusterUnavailable | None:
        """ClusterForbids or ClusterUnavailable, while the API server does not tell us."""
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
