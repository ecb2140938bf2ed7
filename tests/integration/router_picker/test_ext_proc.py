"""A gateway's ext-proc streams against two real router processes over one scripted worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.router_picker.routers import (
    DUPLEX,
    WORKER_BLOCKS,
    RouterProcess,
    answer_until,
    picked,
    two_routers,
)
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

Routers = tuple[RouterProcess, RouterProcess, object]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routers() -> AsyncIterator[Routers]:
    async with two_routers() as running:
        yield running


async def test_header_and_metadata_name_a_ready_router_and_one_for_retries(routers: Routers) -> None:
    first, second, _ = routers
    async with first.exchange() as exchange:
        response = await exchange.headers()
        assert sorted(picked(response)) == sorted([first.http, second.http])
        assert response.request_headers.response.status == ext_proc.CommonResponse.CONTINUE


@pytest.mark.parametrize("mode", [DUPLEX, ProcessingMode.GRPC, None])
async def test_a_body_in_full_duplex_comes_back_chunk_by_chunk(routers: Routers, mode: int | None) -> None:
    async with routers[0].exchange() as exchange:
        picked(await exchange.headers(mode))
        chunks = [b'{"prompt": "', b"\xff" * 100_000, b"", b"not JSON"]
        for number, chunk in enumerate(chunks):
            end = number == len(chunks) - 1
            response = await exchange.ask(request_body=ext_proc.HttpBody(body=chunk, end_of_stream=end))
            echo = response.request_body.response.body_mutation.streamed_response
            assert (echo.body, echo.end_of_stream) == (chunk, end)
        response = await exchange.ask(request_trailers=ext_proc.HttpTrailers())
        assert response.WhichOneof("response") == "request_trailers"


@pytest.mark.parametrize("mode", [ProcessingMode.BUFFERED, ProcessingMode.STREAMED, ProcessingMode.BUFFERED_PARTIAL])
async def test_a_body_in_other_modes_passes_as_it_is(routers: Routers, mode: int) -> None:
    async with routers[0].exchange() as exchange:
        picked(await exchange.headers(mode))
        response = await exchange.ask(request_body=ext_proc.HttpBody(body=b"{}", end_of_stream=True))
        assert response.WhichOneof("response") == "request_body"
        assert not response.request_body.response.HasField("body_mutation")


async def test_the_answer_passes(routers: Routers) -> None:
    async with routers[0].exchange() as exchange:
        await exchange.headers()
        headers = HeaderMap(headers=[HeaderValue(key=":status", raw_value=b"200")])
        response = await exchange.ask(response_headers=ext_proc.HttpHeaders(headers=headers))
        assert response.WhichOneof("response") == "response_headers"
        response = await exchange.ask(response_body=ext_proc.HttpBody(body=b"data: x\n\n"))
        assert response.response_body.response.body_mutation.streamed_response.body == b"data: x\n\n"
        response = await exchange.ask(response_trailers=ext_proc.HttpTrailers())
        assert response.WhichOneof("response") == "response_trailers"


async def test_the_subset_is_honoured(routers: Routers) -> None:
    first, second, _ = routers
    for subset in ([second.http], second.http, ["192.0.2.9:1", second.http]):
        async with first.exchange() as exchange:
            assert picked(await exchange.headers(subset=subset)) == [second.http]


@pytest.mark.parametrize("subset", [[], ["192.0.2.9:8000"]])
async def test_a_subset_of_nobody_is_503(routers: Routers, subset: list[str]) -> None:
    async with routers[0].exchange() as exchange:
        refused = (await exchange.headers(subset=subset)).immediate_response
    assert refused.status.code == 503
    assert json.loads(refused.body)["error"]["code"] == "worker_lost"


async def test_a_subset_that_is_no_list_is_400(routers: Routers) -> None:
    async with routers[0].exchange() as exchange:
        assert (await exchange.headers(subset=7)).immediate_response.status.code == 400


async def test_both_pickers_send_a_session_to_the_same_router(routers: Routers) -> None:
    first, second, _ = routers
    homes = set()
    for number in range(12):
        chosen = []
        for router in (first, second):
            async with router.exchange() as exchange:
                chosen.append(picked(await exchange.headers(x_session_id=f"talk-{number}", x_tenant="acme"))[0])
        assert len(set(chosen)) == 1
        homes.add(chosen[0])
    assert homes == {first.http, second.http}


async def test_a_body_beyond_the_routers_limit_is_413_before_it_is_sent(routers: Routers) -> None:
    async with routers[0].exchange() as exchange:
        told = (await exchange.headers(content_length=str(9 << 20))).immediate_response
    assert (told.status.code, json.loads(told.body)["error"]["param"]) == (413, "body")
    async with routers[0].exchange() as exchange:
        picked(await exchange.headers())
        for _ in range(8):
            answer = await exchange.ask(request_body=ext_proc.HttpBody(body=b"x" * (1 << 20)))
            assert answer.WhichOneof("response") == "request_body"
        answer = await exchange.ask(request_body=ext_proc.HttpBody(body=b"x"))
        assert answer.immediate_response.status.code == 413


async def test_a_message_beyond_any_limit_ends_the_stream_and_not_the_router(routers: Routers) -> None:
    async with routers[0].exchange() as exchange:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await exchange.ask(DUPLEX, request_body=ext_proc.HttpBody(body=b"x" * (32 << 20)))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with routers[0].exchange() as exchange:
        picked(await exchange.headers())


async def test_what_a_router_would_refuse_is_left_to_it(routers: Routers) -> None:
    async with routers[0].exchange() as exchange:
        picked(await exchange.headers(x_priority="much"))


async def test_health_has_the_names_of_the_protocol(routers: Routers) -> None:
    stub = health_pb2_grpc.HealthStub(routers[0].channel)
    for name in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", ""):
        told = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)
        assert told.status == health_pb2.HealthCheckResponse.SERVING, name


async def test_a_full_router_is_passed_over_and_429_is_the_answer_where_all_are(routers: Routers) -> None:
    first, second, _ = routers
    body = {"prompt": [5] * (4 * WORKER_BLOCKS - 40), "max_tokens": 8}  # one fills the worker, one more the queue
    asked = [asyncio.create_task(first.client.post("/v1/completions", json=body)) for _ in range(2)]
    try:
        await first.until(lambda page: page["load"]["waiting"] == 1)
        async with first.exchange() as exchange:  # its own queue, without a probe
            assert picked(await exchange.headers()) == [second.http]
        async with first.exchange() as exchange:
            refused = (await exchange.headers(subset=[first.http])).immediate_response
        headers = {each.header.key: each.header.raw_value for each in refused.headers.set_headers}
        assert refused.status.code == 429
        assert int(headers["retry-after"]) >= 1
        assert json.loads(refused.body)["error"]["code"] == "overloaded"
        # The other picker learns it from its probe.
        answer = await answer_until(second.exchange, refused_at_once, subset=[first.http])
        assert answer.immediate_response.status.code == 429
        page = (await first.client.get("/metrics")).text
        assert 'tandem_picks_total{gen_ai_response_model="demo",outcome="overloaded"} 1' in page
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await first.until(lambda page: page["load"]["waiting"] == page["load"]["running"] == 0)


async def test_a_router_that_is_lost_is_named_no_more_and_503_is_the_answer_without_any(routers: Routers) -> None:
    first, second, worker = routers
    first.process.kill()
    await answer_until(second.exchange, lambda answer: picked(answer) == [second.http])
    await worker.stop()
    answer = await answer_until(second.exchange, refused_at_once)
    assert answer.immediate_response.status.code == 503


def refused_at_once(answer: ext_proc.ProcessingResponse) -> bool:
    return answer.HasField("immediate_response")
