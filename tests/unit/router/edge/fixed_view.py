"""A cluster that says what a test wrote down."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.views.cluster_view import RequestDetail, RequestRow
from shared.errors import NotFound
from shared.rpc.pb.tandem.v1 import inference_pb2


class FixedView:
    """Implements `ClusterView`. Rows belong to the tenant whose name their ids begin with."""

    def __init__(self, status: inference_pb2.ClusterStatus, rows: Sequence[RequestRow] = ()) -> None:
        self.now = status
        self.rows = list(rows)
        self.details: dict[str, RequestDetail] = {}
        self.windows: list[float] = []

    def status(self, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        self.windows.append(window_s)
        return self.now

    def requests(self, tenant: str) -> list[RequestRow]:
        return [row for row in self.rows if row.request_id.startswith(tenant)]

    def request(self, request_id: str, tenant: str) -> RequestDetail:
        detail = self.details.get(request_id)
        if detail is None or not request_id.startswith(tenant):
            raise NotFound(f"this router remembers no request {request_id!r}", field="request_id")
        return detail
