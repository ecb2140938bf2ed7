"""The status API's Explain, over real gRPC."""

from __future__ import annotations

import grpc.aio
import pytest

from services.router.edge.catalog import Catalog
from services.router.edge.grpc_api import SERVICE_NAME, InferenceServicer
from services.router.edge.settings import EdgeSettings
from services.router.explanation import explanation
from services.router.placement.decision import Candidate, Choice, Decision, DecisionLog
from services.router.request_info import request_info
from shared.errors import NotFound, Unauthenticated
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.rpc.server import RpcServer
from tandem import AsyncTandemClient


async def test_a_client_asks_why_and_an_unknown_request_is_said_to_be_unknown():
    log = DecisionLog(8)
    candidate = Candidate("p0", 0.75, (("queue", 0.5), ("prefix", 1.0)), 100, 50, 2, 64)
    log.note(Decision("r", 1, 128, 0.25, Choice("d0", "p0", predicted_ttft_s=0.5, prefills=(candidate,))))
    servicer = InferenceServicer(
        None,
        Catalog([]),
        EdgeSettings(api_keys=("key",)),
        lambda window_s: inference_pb2.ClusterStatus(),
        lambda name: explanation(log, name),
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
            (seen,) = told.prefill_candidates
            assert {part.scorer: part.score for part in seen.parts} == {"queue": 0.5, "prefix": 1.0}
            with pytest.raises(NotFound):
                await client.explain("another")
        async with AsyncTandemClient([server.address]) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.explain("r")
    finally:
        await server.stop(0.0)
