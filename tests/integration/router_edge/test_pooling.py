"""`/v1/embeddings`, `/v1/score` and `/v1/rerank` over the real server, as the OpenAI SDK reads the first."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from services.router.dispatch.request import Pooled, PoolRequest
from services.router.edge.text.pooling import PoolingConfig
from shared.errors import InvalidRequest, ModelLoadError, Overloaded, WorkerLost
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import MODEL
from tests.unit.router.workers.test_adapters import fleet
from tests.waiting import DEADLINE_S


@pytest.fixture
async def edge(start_edge: StartEdge) -> Edge:
    return await start_edge(pooling="last")


async def test_embeddings_of_one_and_of_several_texts(edge: Edge) -> None:
    one = await edge.openai.embeddings.create(model=MODEL, input="ab")  # the SDK asks for base64
    assert np.linalg.norm(one.data[0].embedding) == pytest.approx(1.0)
    ids = [list(edge.tokenizer.encode(text)) for text in ("ab", "abc")]
    assert one.usage.prompt_tokens == one.usage.total_tokens == len(ids[0])
    texts = await edge.openai.embeddings.create(model=MODEL, input=["ab", "abc"], encoding_format="float")
    tokens = await edge.openai.embeddings.create(model=MODEL, input=ids)
    assert [each.index for each in texts.data] == [0, 1]
    for a, b in zip(texts.data, tokens.data, strict=True):
        assert a.embedding == pytest.approx(b.embedding)
    assert texts.data[0].embedding == pytest.approx(one.data[0].embedding)
    assert [request.pooling for request in edge.core.pooled] == ["last"] * 5
    assert len({request.request_id for request in edge.core.pooled}) == 5
    raw = await edge.client.post("/v1/embeddings", json={"input": "ab", "encoding_format": "base64"})
    assert raw.text == json.dumps(raw.json())
    found = np.frombuffer(base64.b64decode(raw.json()["data"][0]["embedding"]), dtype="<f4")
    assert found.tolist() == pytest.approx(one.data[0].embedding)


async def test_fewer_dimensions_are_of_length_one_again(edge: Edge) -> None:
    full = await edge.openai.embeddings.create(model=MODEL, input="abcdefgh")
    few = await edge.openai.embeddings.create(model=MODEL, input="abcdefgh", dimensions=128)
    head = np.array(full.data[0].embedding[:128])
    assert few.data[0].embedding == pytest.approx(head / max(np.linalg.norm(head), 1e-12), abs=1e-6)
    with pytest.raises(openai.BadRequestError) as caught:
        await edge.openai.embeddings.create(model=MODEL, input="a", dimensions=257)
    assert caught.value.param == "dimensions"


async def test_a_score_is_the_cosine_of_a_pair(edge: Edge) -> None:
    body: dict[str, Any] = {"model": MODEL, "text_1": "aab", "text_2": ["aab", "aac", "xyz"]}
    for path in ("/v1/score", "/score"):
        answer = (await edge.client.post(path, json=body)).json()
        scores = [each["score"] for each in answer["data"]]
        assert scores[0] == pytest.approx(1.0)
        assert scores[0] > scores[1] > scores[2]
    pairs = {"text_1": ["a", "b"], "text_2": ["a", "c"]}
    scores = [each["score"] for each in (await edge.client.post("/v1/score", json=pairs)).json()["data"]]
    assert scores[0] == pytest.approx(1.0)
    assert scores[1] < 1.0


async def test_a_rerank_puts_the_nearest_first(edge: Edge) -> None:
    body: dict[str, Any] = {"query": "aab", "documents": ["xyz", {"text": "aab"}, "aac"], "top_n": 2}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = (await edge.client.post(path, json=body)).json()
        assert [each["index"] for each in answer["results"]] == [1, 2]
        assert answer["results"][0]["document"] == {"text": "aab"}
        assert answer["usage"]["total_tokens"] > 0
    bare = await edge.client.post("/v1/rerank", json={**body, "return_documents": False})
    assert all("document" not in each for each in bare.json()["results"])


async def test_a_mean_has_a_salt_of_its_own_and_a_tenant_its_own(start_edge: StartEdge) -> None:
    edge = await start_edge(pooling="mean")
    for tenant in ("a", "a", "b"):
        await edge.client.post("/v1/embeddings", json={"input": "x"}, headers={"x-tenant": tenant})
    salts = [request.salt for request in edge.core.pooled]
    assert len(set(salts)) == 3  # nothing of it may be cached
    last = await start_edge(pooling="last")
    for tenant in ("a", "a", "b"):
        await last.client.post("/v1/embeddings", json={"input": "x"}, headers={"x-tenant": tenant})
    assert [request.salt for request in last.core.pooled] == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [""] * 2049}, "input"),
        ("/v1/embeddings", {"input": [[10**9]]}, "input"),
        ("/v1/embeddings", {"input": "x" * 500}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "messages": [{}]}, "messages"),
        ("/v1/embeddings", {"input": "x", "dimension": 5}, "dimension"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields"),
    ],
)
async def test_bad_bodies_are_refused_by_name(edge: Edge, path: str, body: dict[str, Any], param: str) -> None:
    answer = await edge.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not edge.core.pooled


async def test_long_texts_are_cut_where_that_is_asked_for(edge: Edge) -> None:
    body = {"input": "x" * 500, "truncate_prompt_tokens": 5}
    assert (await edge.client.post("/v1/embeddings", json=body)).status_code == 200
    assert len(edge.core.pooled[0].token_ids) == 5


async def test_the_longest_deadline_holds_for_prompts_that_are_read_alone(start_edge: StartEdge) -> None:
    edge = await start_edge(pooling="last", request_timeout_s=5.0)
    assert (await edge.client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
    assert [request.timeout_s for request in edge.core.pooled] == [5.0]


async def test_a_model_that_embeds_nothing_is_refused_by_name(start_edge: StartEdge) -> None:
    edge = await start_edge()
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = await edge.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "1_Pooling/config.json" in answer.json()["error"]["message"]


async def test_an_adapters_name_is_refused_for_no_vector_is_its_own(start_edge: StartEdge) -> None:
    adapters, (worker,) = fleet(1)
    worker.names["legal"] = "A"
    worker.report()
    edge = await start_edge(pooling="last", adapters=adapters)
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        for name in ("legal", f"{MODEL}:legal"):
            answer = await edge.client.post(path, json={**body, "model": name})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert (await edge.client.post(path, json={**body, "model": MODEL})).status_code == 200


async def test_an_error_of_the_cluster_is_the_clients_own(edge: Edge) -> None:
    async def fail(_: PoolRequest) -> Pooled:
        raise Overloaded("full", retry_after_s=2.0)

    edge.core.pool = fail  # type: ignore[method-assign]
    with pytest.raises(openai.RateLimitError) as caught:
        await edge.openai.embeddings.create(model=MODEL, input=["a", "b"])
    assert caught.value.response.headers["retry-after"] == "2"


async def test_a_client_that_leaves_ends_its_prompts(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(_: PoolRequest) -> Pooled:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(edge.core, "pool", wait)
    call = asyncio.create_task(edge.client.post("/v1/embeddings", json={"input": "a"}))
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    call.cancel()
    await asyncio.wait_for(ended.wait(), DEADLINE_S)


async def test_a_router_that_stops_says_so(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def wait(_: PoolRequest) -> Pooled:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(edge.core, "pool", wait)
    call = asyncio.create_task(edge.client.post("/v1/embeddings", json={"input": "a"}))
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    await edge.stop()
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, WorkerLost.code)


def written(folder: Path, modes: dict[str, bool], modules: list[str] | None = None) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    if modules is not None:
        kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in modules]
        (folder / "modules.json").write_text(json.dumps(kinds))
    return folder


@pytest.mark.parametrize(
    ("mode", "modules", "pooling", "normalized"),
    [
        ("pooling_mode_lasttoken", ["Transformer", "Pooling", "Normalize"], "last", True),
        ("pooling_mode_mean_tokens", ["Transformer", "Pooling"], "mean", False),
        ("pooling_mode_lasttoken", None, "last", True),
    ],
)
def test_the_folder_says_how_a_model_pools(
    tmp_path: Path, mode: str, modules: list[str] | None, pooling: str, normalized: bool
) -> None:
    found = PoolingConfig.load(written(tmp_path, {mode: True}, modules), "auto")
    assert (found.check(), found.is_normalized) == (pooling, normalized)
    assert PoolingConfig.load(tmp_path, "mean").check() == "mean"


@pytest.mark.parametrize(
    ("modes", "modules", "why"),
    [
        ({"pooling_mode_cls_token": True}, None, "cls_token"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, None, "mean_tokens"),
        ({"pooling_mode_lasttoken": True}, ["Transformer", "Pooling", "Dense"], "Dense"),
    ],
)
def test_what_is_not_served_says_why(
    tmp_path: Path, modes: dict[str, bool], modules: list[str] | None, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        PoolingConfig.load(written(tmp_path, modes, modules), "auto").check()


def test_a_broken_file_is_a_load_error(tmp_path: Path) -> None:
    (written(tmp_path, {}) / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError):
        PoolingConfig.load(tmp_path, "auto")
