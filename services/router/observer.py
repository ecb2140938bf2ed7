"""The cluster as this router sees it, for operators; implements `ClusterView` for the edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.router.edge.cluster_view import RequestDetail, RequestRow
from services.router.goodput_view import GoodputView
from services.router.joined_status import joined_status
from shared.rpc.pb.tandem.v1 import inference_pb2

if TYPE_CHECKING:
    from services.router.served_model import ServedModel


class Observer:
    """One router's."""

    def __init__(self, models: Sequence[ServedModel], cache_failures: Callable[[], Sequence[str]]) -> None:
        """`cache_failures`: what the cache's watch has to say."""
        self._models = models
        self._cache_failures = cache_failures
        self._goodput = GoodputView(models)

    def status(self, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        """See `ClusterView`. Raises InvalidRequest (`window_s`)."""
        window = self._goodput.window(window_s)
        whole = joined_status(self._models, self._cache_failures())
        whole.window.CopyFrom(window)
        whole.flow.CopyFrom(self._goodput.flow())
        return whole

    def requests(self, tenant: str) -> list[RequestRow]:
        """See `ClusterView`."""
        return self._goodput.requests(tenant)

    def request(self, request_id: str, tenant: str) -> RequestDetail:
        """See `ClusterView`."""
        return self._goodput.request(request_id, tenant)
