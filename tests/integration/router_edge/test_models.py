"""Several models behind one HTTP and gRPC server: what a request names decides, however its body arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import pytest

from services.router.edge.access import Access
from services.router.edge.catalog import Catalog
from services.router.edge.grpc.model_servicer import ModelServicer
from services.router.edge.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.router.edge.http.app import build_models_app
from services.router.edge.http.model_switch import model_in
from services.router.edge.http.server.http_server import HttpServer
from services.router.edge.input_processor import InputProcessor
from services.router.edge.model_names import ModelNames
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.rate_limits import RateLimits
from shared.model.text.chat_template import ChatTemplate
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from shared.rpc.server import RpcServer, channel
from shared.structure.compiler import StructureCompiler
from tests.integration.router_edge.conftest import cluster_status
from tests.unit.router.edge.fixed_view import FixedView
from tests.unit.router.edge.scripted_core import (
    TEMPLATE,
    ScriptedCore,
    byte_tokenizer,
    make_input_processor,
    text_steps,
)
from tests.waiting import DEADLINE_S

SLOW = {"api_keys": ("slow",), "requests_per_minute": 1}
SETTINGS = {"max_body_bytes": 4096, "api_keys": ("k",), "admin_keys": ("root",), "tenants": {"slow": SLOW}}
KEY = {"authorization": "Bearer k"}


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "a", "x": 1}', "a"),
        (b'{"messages": [{"model": "no"}], "model": "\\u0061b"}', "ab"),
        (b'{"x": "\\"model\\": \\"no\\"", "model":"a"}', "a"),
        (b'{"x": "model", "model":"a"}', "a"),
        (b'{"model": null}', ""),
        (b'{"model": 5, "y": "x"}', ""),
        (b'{"model": {"model": "x"}}', ""),
        (b'{"x": "an end that is cut off: ", "model', None),
        (b'{"model": "cut o', None),
        (b'{"model":', None),
        (b'["model", "a"]', None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"[" * 1_000_000 + b'{"model": "a"}', ""),
    ],
)
async def test_the_model_that_a_body_names(body, model):
    assert await model_in(body) == model


async def test_others_have_their_turn_while_a_long_body_is_looked_through():
    looking = asyncio.ensure_future(model_in(b'["' + b'","' * 50_000))
    num_turns = 0
    while not looking.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 10


def test_every_method_of_the_service_is_passed_on():
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
    assert {method.name for method in methods} <= vars(ModelServicer).keys()


@dataclass
class Door:
    """Two models, a (also called alpha) and b/c; each answers with its own name."""

    client: httpx.AsyncClient
    cores: dict[str, ScriptedCore]

    async def complete(self, content: bytes | AsyncIterator[bytes], **headers: str) -> httpx.Response:
        return await self.client.post("/v1/completions", content=content, headers={**KEY, **headers})


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    settings = EdgeSettings(**SETTINGS)  # type: ignore[arg-type]
    tokenizer = byte_tokenizer(tmp_path)
    template = ChatTemplate({"default": TEMPLATE}, tokenizer.special_tokens)
    rates = RateLimits(settings)
    cores, processors = {}, []
    for name, aliases, beside in (("a", ("alpha",), ("b/c",)), ("b/c", (), ("a",))):
        cores[name] = ScriptedCore(lambda _, name=name: text_steps(tokenizer, f"I am {name}"))
        names = ModelNames(name, aliases, beside)
        structures = StructureCompiler(lambda: tokenizer, (tokenizer.eos_token_id,))
        processors.append(
            InputProcessor(cores[name], tokenizer, template, name, settings, structures, names=names, rates=rates)
        )
    app = build_models_app(Catalog(processors), settings, lambda: b"", FixedView(cluster_status()), Access())
    async with AsyncExitStack() as stack:
        http = HttpServer("127.0.0.1:0", app, settings.limits, settings.tls)
        await http.start()
        stack.push_async_callback(http.stop, 0)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{http.address}", timeout=DEADLINE_S)
        )
        yield Door(client, cores)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def test_a_request_goes_to_the_model_that_it_names(door):
    for asked, served in (("a", "a"), ("alpha", "a"), ("b/c", "b/c"), (None, "a")):
        body = {"prompt": "hi", "max_tokens": 9} | ({"model": asked} if asked else {})
        answer = (await door.complete(json.dumps(body).encode())).json()
        assert answer["choices"][0]["text"] == f"I am {served}"
        assert answer["model"] == served
    split = pieces(b'{"prompt": "hi", "mo', b'del": "b', b'/c"', b', "max_tokens": 9}')
    assert (await door.complete(split)).json()["model"] == "b/c"


async def test_what_is_refused_is_refused_by_the_edge_as_with_one_model(door):
    unknown = await door.complete(b'{"model": "x", "prompt": "hi"}')
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "the model 'x' is not served here; 'a', 'b/c' are"
    assert (await door.complete(b'{"model": "b/c", "prompt": "hi"}', authorization="Bearer no")).status_code == 401
    assert (await door.complete(b'{"model": "b/c", "prompt": ')).status_code == 400
    assert (await door.complete(b'{"model": 3, "prompt": "hi"}')).json()["error"]["param"] == "model"
    assert (await door.complete(b'{"prompt": "' + b"x" * 5000 + b'", "model": "b/c"}')).status_code == 413
    assert (await door.complete(pieces(b'{"prompt": "', b"x" * 5000, b'"}'))).status_code == 413
    assert not any(core.running for core in door.cores.values())


async def test_whether_workers_sleep_is_told_of_the_model_that_the_query_names(door):
    for query, message in (
        ("", "a has no workers"),
        ("?model=alpha", "a has no workers"),
        ("?model=b%2Fc", "b/c has no workers"),
        ("/?model=b%2Fc", "b/c has no workers"),
        ("?model=x", "the model 'x' is not served here"),
    ):
        response = await door.client.get(f"/is_sleeping{query}", headers={"authorization": "Bearer root"})
        assert response.status_code == 404
        assert message in response.json()["error"]["message"]


async def test_a_clients_limits_hold_over_all_models(door):
    first, second = [
        await door.complete(
            json.dumps({"model": model, "prompt": "hi", "max_tokens": 9}).encode(), authorization="Bearer slow"
        )
        for model in ("a", "b/c")
    ]
    assert (first.status_code, second.status_code) == (200, 429)


async def test_readiness_and_the_list_of_models(door):
    listed = (await door.client.get("/v1/models", headers=KEY)).json()["data"]
    assert [(entry["id"], entry.get("root")) for entry in listed] == [("a", None), ("alpha", "a"), ("b/c", None)]
    assert (await door.client.get("/v1/models/", headers=KEY)).json()["data"] == listed
    assert (await door.client.get("/v1/models/b/c", headers=KEY)).json()["id"] == "b/c"
    assert (await door.client.get("/v1/models/x", headers=KEY)).status_code == 404
    door.cores["a"].reason = "no decode worker is ready"
    page = await door.client.get("/readyz")
    assert (page.status_code, page.json()["models"]) == (200, {"a": "no decode worker is ready", "b/c": ""})
    door.cores["b/c"].reason = "draining"
    page = await door.client.get("/readyz")
    assert (page.status_code, page.json()["reason"]) == (503, "a: no decode worker is ready; b/c: draining")


async def test_over_grpc_all_models_are_listed_and_a_batch_is_of_one(tmp_path: Path) -> None:
    settings = EdgeSettings()
    tokenizer = byte_tokenizer(tmp_path)
    cores = [ScriptedCore(lambda _: text_steps(tokenizer, "hello")) for _ in range(2)]
    first, second = (make_input_processor(core, tokenizer, settings) for core in cores)
    first.names, second.names = ModelNames("a", ("alpha",), ("b",)), ModelNames("b", (), ("a",))
    catalog = Catalog([first, second])
    servicers = {
        id(each): InferenceServicer(each, catalog, settings, cluster_status, None, None) for each in (first, second)
    }
    switch = ModelServicer(lambda name: servicers[id(catalog.find(name))])
    server = RpcServer("127.0.0.1:0", switch.register, (SERVICE_NAME,))
    await server.start()
    try:
        async with channel(server.address) as link:
            stub = inference_pb2_grpc.InferenceServiceStub(link)
            listed = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=DEADLINE_S)
            assert [model.id for model in listed.models] == ["a", "alpha", "b"]
            same = [inference_pb2.GenerateRequest(model=name, text="x") for name in ("alpha", "a")]
            async for _ in stub.GenerateBatch(inference_pb2.GenerateBatchRequest(requests=same), timeout=DEADLINE_S):
                pass
            assert [len(core.requests) for core in cores] == [2, 0]
            mixed = [inference_pb2.GenerateRequest(model=name, text="x") for name in ("b", "a")]
            with pytest.raises(grpc.aio.AioRpcError, match="several models"):
                await stub.GenerateBatch(inference_pb2.GenerateBatchRequest(requests=mixed), timeout=DEADLINE_S).read()
            asked = inference_pb2.TokenizeRequest(model="c", text="x")
            with pytest.raises(grpc.aio.AioRpcError, match="'a', 'b' are"):
                await stub.Tokenize(asked, timeout=DEADLINE_S)
    finally:
        await server.stop()
