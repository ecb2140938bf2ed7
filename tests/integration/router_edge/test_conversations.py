"""What `/v1/responses` keeps and `/v1/conversations`, as the OpenAI SDK uses them, over the real server; by records in
memory and by those of a real KV store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from pydantic import SecretStr

from services.kvstore.embedded import EmbeddedValkey
from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings
from services.router.dispatch.request import FinishReason
from services.router.edge.http.responses.background import Background
from services.router.edge.http.responses.shelf import LEASE_S, KeptResponse, Shelf
from services.router.edge.request_ledger import Ledger
from services.router.edge.settings import KeptSettings
from shared.errors import InvalidRequest, Overloaded
from shared.records.client import KVStoreRecords
from shared.records.records import Bounds, MemoryRecords, Records
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import text_steps
from tests.waiting import DEADLINE_S, until

PATH = "/v1/responses"
Ask = dict[str, Any]


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """URL of a real Valkey."""
    valkey = EmbeddedValkey()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(valkey.start())
        yield valkey.url
        runner.run(valkey.stop())


TENANTS = {"a": {"api_keys": ("ka",)}, "b": {"api_keys": ("kb",)}}


async def routers(records: Sequence[Records], start_edge: StartEdge) -> list[Edge]:
    edges = [await start_edge(records=each, tenants=TENANTS) for each in records]
    for edge in edges:
        edge.core.limit = 5000
    return edges


@pytest.fixture
async def memory_twin(start_edge: StartEdge) -> list[Edge]:
    return await routers([MemoryRecords(Bounds(1 << 20, 1 << 20))] * 2, start_edge)


@pytest.fixture
async def redis_records(store: str) -> AsyncIterator[Sequence[Records]]:
    server = KVStoreServer(KVStoreSettings(bind="127.0.0.1:0", redis_url=SecretStr(store), redis_timeout_s=5))
    await server.start()
    clients = [KVStoreRecords(server.address) for _ in range(2)]
    yield clients
    for client in clients:
        await client.close()
    await server.close()


@pytest.fixture
async def redis_twin(redis_records: Sequence[Records], start_edge: StartEdge) -> list[Edge]:
    return await routers(redis_records, start_edge)


@pytest.fixture(params=["memory", "redis"])
def twin(request: pytest.FixtureRequest) -> list[Edge]:
    """Two routers that share what they keep."""
    found: list[Edge] = request.getfixturevalue(f"{request.param}_twin")
    return found


def of(edge: Edge, key: str = "ka") -> openai.AsyncOpenAI:
    return edge.openai.with_options(api_key=key)


def prompts(edge: Edge) -> list[str]:
    return [edge.tokenizer.decode(request.prompt_token_ids) for request in edge.core.requests]


async def test_a_chain_of_responses_is_one_conversation_on_any_router(twin: list[Edge]) -> None:
    one, other = twin
    one.stops_with("Noah.")
    other.stops_with("An ark.")
    first = await of(one).responses.create(model="acme/tiny", input="Who?", instructions="Be brief.")
    assert first.store is True
    second = await of(other).responses.create(model="acme/tiny", input="What?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = await of(one).responses.create(model="acme/tiny", input="Why?", previous_response_id=second.id, stream=True)
    events = [event async for event in third]
    assert events[-1].type == "response.completed"
    assert prompts(other)[0].endswith("<user>Who?<assistant>Noah.<user>What?<assistant>")
    assert "Be brief." not in prompts(other)[0]  # instructions are a call's own
    assert prompts(one)[1].endswith("<user>Who?<assistant>Noah.<user>What?<assistant>An ark.<user>Why?<assistant>")
    kept = await of(other).responses.retrieve(events[-1].response.id)  # type: ignore[union-attr]
    assert kept.output_text == "Noah."
    sessions = {request.session for edge in twin for request in edge.core.requests}
    assert sessions == {first.id}


async def test_input_items_come_back_in_pages(twin: list[Edge]) -> None:
    one, other = twin
    one.stops_with("Yes.")
    items = [{"role": "user", "content": f"turn {i}"} for i in range(5)]
    response = await of(one).responses.create(model="acme/tiny", input=items)  # type: ignore[arg-type]
    found = [item async for item in of(other).responses.input_items.list(response.id, limit=2, order="asc")]
    assert [item.content[0].text for item in found] == [f"turn {i}" for i in range(5)]  # type: ignore[union-attr]
    newest = await of(other).responses.input_items.list(response.id, limit=1)
    assert newest.data[0].content[0].text == "turn 4"  # type: ignore[union-attr]
    for query in ("limit=0", "limit=x", "limit=00000100999", f"limit={'1' * 5000}", "order=up", "after=msg_none"):
        answer = await one.client.get(f"{PATH}/{response.id}/input_items?{query}", headers={"x-api-key": "ka"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_what_is_not_stored_or_deleted_or_anothers_is_not_there(twin: list[Edge]) -> None:
    one, other = twin
    one.stops_with("Yes.")
    silent = await of(one).responses.create(model="acme/tiny", input="hi", store=False)
    assert silent.store is False
    kept = await of(one).responses.create(model="acme/tiny", input="hi")
    await of(other).responses.delete(kept.id)
    mine = await of(one).responses.create(model="acme/tiny", input="hi")
    for client, response_id in (
        (of(one), silent.id),
        (of(one), kept.id),
        (of(other, "kb"), mine.id),
        (of(one), "x" * 999),
    ):
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(response_id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="acme/tiny", input="hi", previous_response_id=response_id)
        assert caught.value.param == "previous_response_id"
    assert (await of(other).responses.retrieve(mine.id)).output_text == "Yes."


async def test_a_background_response_is_read_later_on_any_router(twin: list[Edge]) -> None:
    one, other = twin
    gate = asyncio.Event()
    one.core.script = lambda _: [gate, *text_steps(one.tokenizer, "Done.", FinishReason.STOP)]
    begun = await of(one).responses.create(model="acme/tiny", input="hi", background=True)
    assert begun.status == "queued"
    running = await of(other).responses.retrieve(begun.id)
    assert (running.status, running.output) == ("in_progress", [])
    with pytest.raises(openai.BadRequestError) as caught:
        await of(other).responses.create(model="acme/tiny", input="hi", previous_response_id=begun.id)
    assert caught.value.param == "previous_response_id"
    gate.set()

    async def ended() -> Any:
        found = await of(other).responses.retrieve(begun.id)
        return found if found.status != "in_progress" else None

    done = await until(ended)
    assert (done.status, done.output_text, done.background) == ("completed", "Done.", True)
    assert (await of(other).responses.cancel(begun.id)).status == "completed"


@pytest.mark.parametrize("by", [0, 1])
async def test_a_cancelled_response_frees_the_cluster_whichever_router_cancels_it(twin: list[Edge], by: int) -> None:
    one = twin[0]
    one.core.script = lambda _: [asyncio.Event()]
    begun = await of(one).responses.create(model="acme/tiny", input="hi", background=True)
    await asyncio.wait_for(one.core.submitted.wait(), DEADLINE_S)
    assert (await of(twin[by]).responses.cancel(begun.id)).status == "cancelled"
    await one.closed()
    assert (await of(one).responses.cancel(begun.id)).status == "cancelled"
    assert (await of(one).responses.retrieve(begun.id)).status == "cancelled"


async def test_a_response_in_the_background_that_fails_says_why(edge: Edge) -> None:
    edge.core.script = lambda _: [ValueError("a bug")]
    begun = await edge.openai.responses.create(model="acme/tiny", input="hi", background=True)

    async def ended() -> Any:
        found = await edge.openai.responses.retrieve(begun.id)
        return found if found.status != "in_progress" else None

    done = await until(ended)
    assert done.status == "failed"
    assert done.error is not None
    assert done.error.code == "server_error"
    with pytest.raises(openai.BadRequestError):
        await edge.openai.responses.create(model="acme/tiny", input="hi", background=True, max_output_tokens=10**6)


async def test_a_lost_router_leaves_a_failed_response() -> None:
    now = 0.0
    records = MemoryRecords(Bounds(1 << 20, 1 << 20), lambda: now)
    shelf = Shelf(records, KeptSettings())
    body = {"id": "resp_1", "status": "in_progress", "background": True, "output": []}
    await shelf.keep("a", KeptResponse(body, []))
    assert await shelf.lease("a", "resp_1")
    background = Background(shelf, 1)
    assert (await background.look("a", "resp_1")).is_running
    now = LEASE_S + 1
    lost = await background.look("a", "resp_1")
    assert (lost.body["status"], lost.body["error"]["code"]) == ("failed", "server_error")
    assert (await background.cancel("a", "resp_1")).body["status"] == "failed"


async def test_too_many_in_the_background_are_refused(start_edge: StartEdge) -> None:
    edge = await start_edge(lambda _: [asyncio.Event()], kept={"max_background": 1})
    first = await edge.openai.responses.create(model="acme/tiny", input="hi", background=True)
    ledger = Mock(Ledger)
    edge.servicer._input_processor.ledger = ledger
    with pytest.raises(openai.RateLimitError):
        await edge.openai.responses.create(model="acme/tiny", input="hi", background=True)
    ((refused,), _) = ledger.ended.call_args  # it is counted like any other
    assert refused.outcome == Overloaded.code
    await edge.openai.responses.delete(first.id)
    await edge.closed()
    with pytest.raises(openai.NotFoundError):
        await edge.openai.responses.retrieve(first.id)


async def test_a_response_that_cannot_be_kept_leaves_no_lease() -> None:
    shelf = Shelf(MemoryRecords(Bounds(1 << 12, 1 << 12)), KeptSettings())
    background = Background(shelf, 1)
    computed = asyncio.Event()

    async def compute(_: bytes) -> None:
        computed.set()

    body: dict[str, Any] = {"id": "resp_1", "status": "in_progress", "background": True, "output": ["x" * (1 << 12)]}
    with pytest.raises(InvalidRequest):
        await background.begin("a", KeptResponse(body, []), compute)
    assert not await shelf.is_leased("a", "resp_1")
    await background.begin("a", KeptResponse({**body, "output": []}, []), compute)
    await asyncio.wait_for(computed.wait(), DEADLINE_S)
    await background.close()


async def test_a_burst_in_the_background_keeps_to_the_limit(
    start_edge: StartEdge, redis_records: Sequence[Records]
) -> None:
    edge = await start_edge(lambda _: [asyncio.Event()], kept={"max_background": 2}, records=redis_records[0])
    ask: Ask = {"model": "acme/tiny", "input": "hi", "background": True}
    answers = await asyncio.gather(*(edge.client.post(PATH, json=ask) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 6


async def test_where_nothing_is_kept_what_needs_it_is_refused_by_name(start_edge: StartEdge) -> None:
    edge = await start_edge(kept={"ttl_s": 0})
    edge.stops_with("Yes.")
    answer = await edge.openai.responses.create(model="acme/tiny", input="hi")
    assert answer.store is False
    asks: list[Ask] = [{"store": True}, {"background": True}, {"previous_response_id": "r"}, {"conversation": "c"}]
    for ask in asks:
        with pytest.raises(openai.BadRequestError) as caught:
            await edge.openai.responses.create(model="acme/tiny", input="hi", **ask)
        assert caught.value.param == next(iter(ask))
    with pytest.raises(openai.BadRequestError):
        await edge.openai.conversations.create()


async def test_a_conversation_is_made_read_changed_and_ended(twin: list[Edge]) -> None:
    one, other = twin
    made = await of(one).conversations.create(
        metadata={"topic": "ark"}, items=[{"type": "message", "role": "user", "content": "Who?"}]
    )
    found = await of(other).conversations.retrieve(made.id)
    assert (found.id, found.metadata, found.created_at) == (made.id, {"topic": "ark"}, made.created_at)
    changed = await of(other).conversations.update(made.id, metadata={"topic": "flood"})
    assert changed.metadata == {"topic": "flood"}
    added = await of(other).conversations.items.create(
        made.id,
        items=[
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
    )
    assert [item.type for item in added.data] == ["function_call", "function_call_output"]
    items = [item async for item in of(one).conversations.items.list(made.id, order="asc", limit=1)]
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    message: Any = await of(one).conversations.items.retrieve(items[0].id, conversation_id=made.id)  # type: ignore[arg-type]
    assert message.content[0].text == "Who?"
    await of(one).conversations.items.delete(added.data[0].id, conversation_id=made.id)  # type: ignore[arg-type]
    left = [item async for item in of(other).conversations.items.list(made.id)]
    assert [item.type for item in left] == ["function_call_output", "message"]
    assert (await of(one).conversations.delete(made.id)).deleted
    for client in (of(one), of(other)):
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)


async def test_responses_read_a_conversation_and_add_to_it(twin: list[Edge]) -> None:
    one, other = twin
    one.stops_with("Noah.")
    other.stops_with("An ark.")
    made = await of(one).conversations.create()
    await of(one).responses.create(model="acme/tiny", input="Who?", conversation=made.id)
    second = await of(other).responses.create(
        model="acme/tiny", input="What?", conversation={"id": made.id}, store=False
    )
    assert second.conversation is not None
    assert second.conversation.id == made.id
    assert prompts(other)[0].endswith("<user>Who?<assistant>Noah.<user>What?<assistant>")
    items: list[Any] = [item async for item in of(one).conversations.items.list(made.id, order="asc")]
    assert [item.content[0].text for item in items] == ["Who?", "Noah.", "What?", "An ark."]
    with pytest.raises(openai.NotFoundError) as caught:
        await of(one, "kb").responses.create(model="acme/tiny", input="x", conversation=made.id)
    assert caught.value.param == "conversation"
    for ask in (of(one, "kb").conversations.retrieve, of(one, "kb").conversations.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(made.id)


async def test_of_turns_at_once_none_is_lost(twin: list[Edge]) -> None:
    for edge in twin:
        edge.stops_with("Yes.")
    made = await of(twin[0]).conversations.create()
    await asyncio.gather(
        *(of(twin[i % 2]).responses.create(model="acme/tiny", input=f"q{i}", conversation=made.id) for i in range(8))
    )
    items: list[Any] = [item async for item in of(twin[0]).conversations.items.list(made.id, order="asc")]
    asked = [item.content[0].text for item in items if item.role == "user"]
    assert sorted(asked) == [f"q{i}" for i in range(8)]
    assert len(items) == 16


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/v1/conversations", {"items": [{"type": "web_search_call"}]}, "items"),
        ("POST", "/v1/conversations", {"items": [{"role": "user"}]}, "items"),
        ("POST", "/v1/conversations", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("POST", "/v1/conversations", {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ("POST", "/v1/conversations", {"metadta": {}}, "metadta"),
        ("POST", "/v1/conversations/{id}", {}, "metadata"),
        ("POST", "/v1/conversations/{id}/items", {"items": []}, "items"),
    ],
)
async def test_bad_bodies_are_refused_by_name(edge: Edge, method: str, path: str, body: Ask, param: str) -> None:
    made = await edge.openai.conversations.create()
    answer = await edge.client.request(method, path.replace("{id}", made.id), json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_conversation_that_grows_too_long_is_refused_by_name(start_edge: StartEdge) -> None:
    edge = await start_edge(kept={"max_bytes": 1 << 16})
    made = await edge.openai.conversations.create()
    item = {"role": "user", "content": "x" * 40_000}
    path = f"/v1/conversations/{made.id}/items"
    assert (await edge.client.post(path, json={"items": [item]})).status_code == 200
    answer = await edge.client.post(path, json={"items": [item]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items")
    assert len([item async for item in edge.openai.conversations.items.list(made.id)]) == 1
