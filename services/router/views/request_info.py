"""Where a request stands, as the API reports it."""

from __future__ import annotations

import time

from services.router.dispatch.active_request import ActiveRequest
from shared.errors import NotFound
from shared.rpc.pb.tandem.v1 import inference_pb2


def request_info(active: ActiveRequest | None, request_id: str) -> inference_pb2.RequestInfo:
    """Raises NotFound (`request_id`) for a request that neither waits nor runs here."""
    if active is None:
        raise NotFound(
            f"request {request_id!r} neither waits nor runs at this router", field="request_id", value=request_id
        )
    return inference_pb2.RequestInfo(
        request_id=request_id,
        state=active.state.value,
        num_prompt_tokens=active.request.num_prompt_tokens,
        num_output_tokens=len(active.produced),
        num_attempts=active.num_attempts,
        age_s=time.perf_counter() - active.request.arrived_at,
        prefill_worker=active.record.prefill_worker,
        decode_worker=active.record.decode_worker,
    )
