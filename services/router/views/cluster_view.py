"""What the edge shows of the cluster to operators: the status, and requests as rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.rpc.pb.tandem.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request, waiting, running or ended lately. Times are milliseconds; None: not known, or not yet."""

    request_id: str
    model: str
    state: str
    """One of the router's states; ended ones: finished, cut, refused, failed."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    age_ms: float
    """Since its arrival; of an ended one, since its end."""
    duration_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    prefill_worker: str
    decode_worker: str
    missed: str = ""
    """ttft, tpot, refused or failed; empty for good ones and for those that run."""
    lost_to: str = ""
    """A cause."""
    error: str = ""
    """The error's code."""


@dataclass(frozen=True, slots=True)
class RequestDetail:
    """Details of one request beside its row."""

    row: RequestRow
    split: dict[str, float]
    """The parts of its time to the first token in order, milliseconds."""
    parts: dict[str, float]
    """All of its time by cause, milliseconds."""
    explanation: inference_pb2.Explanation | None
    """Its placements, while they are remembered."""


class ClusterView(Protocol):
    """The cluster as a router sees it. The calls are cheap enough for many readers a second, and change nothing."""

    def status(self, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        """The whole cluster; `window_s` of its window, 0 = the default."""
        ...

    def requests(self, tenant: str) -> list[RequestRow]:
        """Running requests, oldest first, then ended ones, newest first; bounded. `tenant`: its own; empty = all."""
        ...

    def request(self, request_id: str, tenant: str) -> RequestDetail:
        """Raises NotFound for an unknown one, or another tenant's."""
        ...
