"""What stands beside the endpoints for answers: tokens, version, documents, CORS, request ids."""

from __future__ import annotations

import re

import pytest

from tests.integration.router_edge.conftest import Edge, StartEdge


async def test_tokens_of_a_prompt_and_of_a_conversation_and_back(edge: Edge) -> None:
    found = (await edge.client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})).json()
    assert found["tokens"] == edge.tokenizer.encode("hi")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 100)
    assert found["token_strs"] == [edge.tokenizer.token_text(t) for t in found["tokens"]]
    bare = (await edge.client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})).json()
    assert bare["tokens"] == found["tokens"][1:]
    chat = (await edge.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    text = (await edge.client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text == "<|bos|><user>hi<assistant>"


async def test_what_a_client_needs_to_tokenize_here(edge: Edge) -> None:
    found = (await edge.client.get("/tokenizer_info")).json()
    eos = edge.tokenizer.special_tokens["eos_token"]
    assert found["eos_token"] == eos
    assert (await edge.client.post("/tokenize", json={"prompt": eos, "add_special_tokens": False})).json()["count"] == 1
    assert "messages" in found["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_field(
    edge: Edge, path: str, body: dict[str, object], param: str
) -> None:
    answer = await edge.client.post(path, json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


async def test_version_ping_and_the_list_of_models_with_a_slash(edge: Edge) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", (await edge.client.get("/version")).json()["version"])
    assert (await edge.client.get("/ping")).status_code == 200
    assert (await edge.client.get("/v1/models/")).json() == (await edge.client.get("/v1/models")).json()


async def test_the_page_of_the_api_loads_nothing_from_elsewhere(edge: Edge) -> None:
    page = await edge.client.get("/", follow_redirects=True)
    assert page.url.path == "/docs"
    assert "/v1/chat/completions" in page.text
    assert "tool_choice" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text


async def test_every_answer_has_the_clients_request_id_or_a_drawn_one(edge: Edge) -> None:
    for path in ("/v1/models", "/v2", "/version"):
        given = await edge.client.get(path, headers={"x-request-id": "mine"})
        assert given.headers["x-request-id"] == "mine"
        assert len((await edge.client.get(path)).headers["x-request-id"]) == 36


async def test_browsers_are_let_in_by_setting_alone(edge: Edge, start_edge: StartEdge) -> None:
    asked = {"origin": "https://app.example.com", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in (await edge.client.get("/v1/models", headers=asked)).headers
    open_edge = await start_edge(cors_origins=["https://app.example.com"])
    flight = await open_edge.client.options("/v1/chat/completions", headers=asked)
    assert flight.headers["access-control-allow-origin"] == "https://app.example.com"
    other = await open_edge.client.get("/v1/models", headers={"origin": "https://evil.example.com"})
    assert "access-control-allow-origin" not in other.headers
