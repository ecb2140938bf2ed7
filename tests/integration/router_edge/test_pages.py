"""What stands beside the endpoints for answers: tokens, version, documents, CORS, request ids."""

from __future__ import annotations

import re

import pytest

from services.router.edge.http.pages.live_pages import PAGE
from services.router.views.cluster_view import RequestDetail, RequestRow
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


async def test_a_slash_at_a_paths_end_changes_nothing(edge: Edge) -> None:
    edge.says("Hi.")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/chat/completions/", "/v1/chat/completions//"):
        answer = await edge.client.post(path, json=body)
        assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")
    assert (await edge.client.get("/healthz/")).status_code == 200
    unknown = await edge.client.get("/v1/nothing/")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_version_ping_and_the_list_of_models_with_a_slash(edge: Edge) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", (await edge.client.get("/version")).json()["version"])
    assert (await edge.client.get("/ping")).status_code == 200
    assert (await edge.client.get("/v1/models/")).json() == (await edge.client.get("/v1/models")).json()


async def test_the_page_of_the_api_loads_nothing_from_elsewhere(edge: Edge) -> None:
    page = await edge.client.get("/docs")
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


async def test_the_page_is_small_complete_and_runs_nothing_inline(edge: Edge) -> None:
    page = await edge.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on[a-z]+=", page.text)
    names = set(re.findall(r'"page/([^"]+)"', page.text))
    num_bytes = len(page.content)
    seen: set[str] = set()
    while names - seen:
        name = (names - seen).pop()
        seen.add(name)
        file = await edge.client.get(f"/page/{name}")
        assert file.status_code == 200, name
        assert "http://" not in file.text.replace("http://www.w3.org", "")
        assert "https://" not in file.text
        assert "innerHTML" not in file.text
        names |= set(re.findall(r'from "\./([^"]+)"', file.text))
        num_bytes += len(file.content)
    assert seen == {path.name for path in PAGE.iterdir()} - {"index.html"}
    assert num_bytes < 200_000


async def test_the_page_has_no_other_files(edge: Edge) -> None:
    for name in ("nothing.js", "../__init__.py", "..%2f__init__.py", "%2e%2e/settings.py"):
        assert (await edge.client.get(f"/page/{name}")).status_code == 404


async def test_the_status_is_of_the_window_that_is_asked_for(edge: Edge) -> None:
    assert (await edge.client.get("/status")).status_code == 200
    assert (await edge.client.get("/status", params={"window_s": "300"})).status_code == 200
    assert edge.view.windows == [0.0, 300.0]
    for wrong in ("x", "-1", "0", "nan"):
        answer = await edge.client.get("/status", params={"window_s": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "window_s")


async def test_a_tenants_key_shows_its_own_requests_alone(start_edge: StartEdge) -> None:
    edge = await start_edge(api_keys=("all",), tenants={"a": {"api_keys": ("of-a",)}})
    rows = [
        RequestRow(name, "m", "finished", 5, 0, 7, 1.0, 2.0, 3.0, None, "p0", "d0") for name in ("a-1", "b-1", "a-2")
    ]
    edge.view.rows += rows
    edge.view.details = {row.request_id: RequestDetail(row, {"queue_ms": 1.0}, {}, None) for row in rows}

    async def seen(key: str) -> list[str]:
        answer = await edge.client.get("/status/requests", headers={"authorization": f"Bearer {key}"})
        return [row["request_id"] for row in answer.json()["requests"]]

    assert await seen("all") == ["a-1", "b-1", "a-2"]
    assert await seen("of-a") == ["a-1", "a-2"]
    for key, name, status in (("all", "b-1", 200), ("of-a", "a-1", 200), ("of-a", "b-1", 404)):
        answer = await edge.client.get(f"/status/requests/{name}", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
