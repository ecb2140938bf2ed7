"""The status API's Explain, over real gRPC."""

from __future__ import annotations

import math

import grpc.aio
import pytest

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.record import Ask, RequestEvent, RequestRecord, RequestState
from services.router.dispatch.request import Request
from services.router.edge.catalog import Catalog
from services.router.edge.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.router.edge.settings import EdgeSettings
from services.router.placement.decision import Candidate, Choice, Pair
from services.router.views.explanation import explanation, request_info
from shared.engine.sampling_params import SamplingParams
from shared.errors import NotFound, Unauthenticated
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from shared.rpc.server import RpcServer, channel
from tandem import AsyncTandemClient


async def test_a_client_asks_why_and_an_unknown_request_is_said_to_be_unknown():
    active = ActiveRequest(Request("r", (1,), SamplingParams(), tenant="a"), WriteCoalescer())
    record = RequestRecord(Ask("r", tenant="a", num_prompt_tokens=128))
    candidate = Candidate("p0", 0.75, (("queue", 0.5), ("prefix", 1.0)), 100, 50, 2, 64)
    pairs = (Pair("d0", "p0", 0.5, 0.02, 0.9, 0.3), Pair("d0", "d0", math.inf, math.inf, 0.0, 20.0))
    record.choices.append(Choice("d0", "p0", predicted_ttft_s=0.5, prefills=(candidate,), pairs=pairs))
    record.add(RequestEvent.MATCHED, RequestState.QUEUED, at=1.0)
    record.add(RequestEvent.CHOOSING, RequestState.QUEUED, at=1.25)
    servicer = InferenceServicer(
        None,
        Catalog([]),
        EdgeSettings(api_keys=("key",), tenants={"a": {"api_keys": ("ka",)}, "b": {"api_keys": ("kb",)}}),
        lambda window_s: inference_pb2.ClusterStatus(),
        lambda name, tenant: explanation(record if name == "r" else None, name, tenant),
        lambda name, tenant: request_info(active if name == "r" else None, name, tenant),
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
        about = inference_pb2.GetRequestRequest(request_id="r")
        for key, is_shown in (("key", True), ("ka", True), ("kb", False)):
            async with AsyncTandemClient([server.address], api_key=key) as client, channel(server.address) as bare:
                asked = inference_pb2_grpc.InferenceServiceStub(bare).GetRequest
                if is_shown:
                    assert (await client.explain("r")).request_id == "r"
                    assert (await asked(about, metadata=(("authorization", f"Bearer {key}"),))).request_id == "r"
                else:  # another tenant's is not there
                    with pytest.raises(NotFound):
                        await client.explain("r")
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await asked(about, metadata=(("authorization", f"Bearer {key}"),))
                    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        async with AsyncTandemClient([server.address]) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.explain("r")
    finally:
        await server.stop(0.0)
