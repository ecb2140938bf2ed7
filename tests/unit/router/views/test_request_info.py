"""Where a request stands, as the API reports it."""

from __future__ import annotations

import pytest

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.record import RequestEvent
from services.router.dispatch.request import Request
from services.router.views.explanation import request_info
from shared.engine.sampling_params import SamplingParams
from shared.errors import NotFound
from shared.rpc.pb.tandem.v1 import types_pb2


async def test_it_follows_the_request_and_knows_no_other():
    active = ActiveRequest(Request("r", (1, 2, 3), SamplingParams(max_tokens=9)), WriteCoalescer())
    told = request_info(active, "r")
    assert (told.state, told.num_prompt_tokens, told.num_output_tokens) == ("queued", 3, 0)
    for event in (RequestEvent.PLACED, RequestEvent.SUBMITTED):
        active.move(event)
    active.emit(types_pb2.SequenceTokens(token_ids=[7, 8]))
    told = request_info(active, "r")
    assert (told.state, told.num_output_tokens) == ("prefilling", 2)
    assert told.age_s > 0
    with pytest.raises(NotFound) as caught:
        request_info(None, "x")
    assert caught.value.field == "request_id"
