"""A tenant's adapters do not exist for others, over HTTP and gRPC alike."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from shared.rpc.pb.tandem.v1 import inference_pb2
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import MODEL
from tests.unit.router.workers.test_adapters import FakeWorker, fleet
from tests.waiting import DEADLINE_S

TENANTS = {"a": {"api_keys": ("ka",), "adapters": ("a*",), "max_adapters": 1}, "b": {"api_keys": ("kb",)}}
SETTINGS: dict[str, Any] = {"tenants": TENANTS, "admin_keys": ("root",)}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
PLACES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {**CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "x"},
    "/v1/cache/warm": {"prompt": "x"},
    "/v1/cache/close": {"prompt_cache_key": "x"},
    "/v1/cache/expect": {"prompt_cache_key": "x", "next_turn_s": 30},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def started(start_edge: StartEdge) -> tuple[Edge, FakeWorker]:
    adapters, (worker,) = fleet(1)
    worker.names = {"a": "A", "common": "C"}
    worker.report()
    return await start_edge(**SETTINGS, adapters=adapters), worker


async def test_another_tenants_adapter_is_answered_as_an_unknown_model_everywhere(start_edge: StartEdge) -> None:
    edge, _ = await started(start_edge)
    for path, body in PLACES.items():
        answers = []
        for name in ("a", "z", f"{MODEL}:a", f"{MODEL}:z"):
            response = await edge.client.post(path, json={**body, "model": name}, headers=key("kb"))
            assert (response.status_code, "is not served here" in response.text) == (404, True), (path, response.text)
            answers.append(response.text.replace(f"'{name}'", "'NAME'"))
        assert len(set(answers)) == 1, (path, answers)
    for name in ("a", "z"):
        assert (await edge.client.get(f"/v1/models/{name}", headers=key("kb"))).status_code == 404
    assert not edge.core.running
    requests = inference_pb2.GenerateRequest(text="x", model="a")
    metadata = (("authorization", "Bearer kb"),)
    for call in (
        edge.grpc.Tokenize(inference_pb2.TokenizeRequest(text="x", model="a"), metadata=metadata, timeout=DEADLINE_S),
        edge.grpc.Detokenize(inference_pb2.DetokenizeRequest(model="a"), metadata=metadata, timeout=DEADLINE_S),
        edge.grpc.Generate(requests, metadata=metadata, timeout=DEADLINE_S).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_lists_have_what_the_caller_may_use_and_it_answers(start_edge: StartEdge) -> None:
    edge, _ = await started(start_edge)
    edge.stops_with("ok")
    for caller, names in (("ka", {MODEL, "a", "common"}), ("kb", {MODEL, "common"}), ("root", {MODEL, "common"})):
        listed = (await edge.client.get("/v1/models", headers=key(caller))).json()["data"]
        assert {entry["id"] for entry in listed} == names
        twin = await edge.grpc.ListModels(
            inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {caller}"),), timeout=DEADLINE_S
        )
        assert {model.id for model in twin.models} == names
        for name in names:
            body = {"prompt": "x", "model": name}
            response = await edge.client.post("/v1/completions", json=body, headers=key(caller))
            assert response.status_code == 200, response.text


async def test_a_tenants_quota_refuses_one_more_and_nothing_changes(start_edge: StartEdge) -> None:
    edge, worker = await started(start_edge)
    body = {"lora_name": "a2", "lora_path": "/a2"}
    refused = await edge.client.post("/v1/load_lora_adapter", json=body, headers=key("root"))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (429, "quota_exceeded", "max_adapters")
    assert (worker.names, worker.staged) == ({"a": "A", "common": "C"}, [])
    for tenant in ("ka", "kb"):
        response = await edge.client.post("/v1/load_lora_adapter", json=body, headers=key(tenant))
        assert response.status_code == 401
    reload = {"lora_name": "a", "lora_path": "/a2"}
    assert (await edge.client.post("/v1/load_lora_adapter", json=reload, headers=key("root"))).status_code == 200
    assert worker.names == {"a": "A2", "common": "C"}
