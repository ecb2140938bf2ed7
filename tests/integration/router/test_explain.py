"""The status API's Explain, over real gRPC."""

from __future__ import annotations

import math

import grpc.aio
import pytest

from services.router.dispatch.record import Ask, RequestEvent, RequestRecord, RequestState
from services.router.edge.catalog import Catalog
from services.router.edge.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.router.edge.settings import EdgeSettings
from services.router.placement.decision import Candidate, Choice, Pair
from services.router.views.explanation import explanation, request_info
from shared.errors import NotFound, Unauthenticated
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.rpc.server import RpcServer
from tandem import AsyncTandemClient


async def test_a_client_asks_why_and_an_unknown_request_is_said_to_be_unknown():
    record = RequestRecord(Ask("r", num_prompt_tokens=128))
    candidate = Candidate("p0", 0.75, (("queue", 0.5), ("prefix", 1.0)), 100, 50, 2, 64)
    pairs = (Pair("d0", "p0", 0.5, 0.02, 0.9, 0.3), Pair("d0", "d0", math.inf, math.inf, 0.0, 20.0))
    record.choices.append(Choice("d0", "p0", predicted_ttft_s=0.5, prefills=(candidate,), pairs=pairs))
    record.add(RequestEvent.MATCHED, RequestState.QUEUED, at=1.0)
    record.add(RequestEvent.CHOOSING, RequestState.QUEUED, at=1.25)
    servicer = InferenceServicer(
        None,
        Catalog([]),
        EdgeSettings(api_keys=("key",)),
        lambda window_s: inference_pb2.ClusterStatus(),
        lambda name: explanation(record if name == "r" else None, name),
        lambda name: request_info(None, name),
    )

    def register(server: grpc.aio.Server) -> None:
        servicer.register(server)

    server = RpcServer("127.0.0.1:0", register, (SERVICE_NAME,))
    await server.start()
    try:
        async with AsyncTandemClient([server.address], api_key="key") as client:
            (told,) = (await client.explain("r")).attempts
            assert (told.decode_worker, told.prefill_worker, told.predicted_ttft_ms) == ("d0", "p0", 500.0)
            assert (told.attempt, told.num_prompt_tokens, told.queue_ms) == (1, 128, 250.0)
            (seen,) = told.prefill_candidates
            assert {part.scorer: part.score for part in seen.parts} == {"queue": 0.5, "prefix": 1.0}
            best, unknown = told.pairs
            assert (best.decode_worker, best.prefill_worker, best.ttft_ms, best.in_time) == (
                "d0", "p0", 500.0, pytest.approx(0.9),
            )  # fmt: skip
            assert not unknown.HasField("ttft_ms")
            assert not unknown.HasField("tpot_ms")
            with pytest.raises(NotFound):
                await client.explain("another")
        async with AsyncTandemClient([server.address]) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.explain("r")
    finally:
        await server.stop(0.0)
