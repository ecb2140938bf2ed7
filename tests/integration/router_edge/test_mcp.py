"""Tools of remote MCP servers at `/v1/responses`: listed, called, approved, and no server asked that is not allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.http.responses.inner import item_messages
from services.router.edge.http.responses.schemas import InputItem
from shared.errors import Overloaded
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import text_steps

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "roll", "arguments": {"sides": 6}}</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {
        "name": "roll",
        "description": "Rolls a die.",
        "inputSchema": {"type": "object", "properties": {"sides": {"type": "integer"}}},
        "annotations": {"readOnlyHint": True},
    },
    {"name": "erase", "inputSchema": {"type": "object", "properties": {}}},
]


@dataclass
class ToolServer:
    """A small MCP server, which answers one call a page with server-sent events and the rest with JSON."""

    url: str = ""
    tools: list[dict[str, Any]] = field(default_factory=lambda: list(TOOLS))
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # method, params
    headers: list[dict[str, str]] = field(default_factory=list)
    result: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {"content": [{"type": "text", "text": "4"}]}
    called: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)  # calls of tools

    def __post_init__(self) -> None:
        self.may_answer.set()

    async def post(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        method, params = message["method"], message.get("params", {})
        self.heard.append((method, params))
        self.headers.append(dict(request.headers))
        if "id" not in message:
            return web.Response(status=202)
        if method != "initialize" and request.headers.get("Mcp-Session-Id") != "s1":
            return web.Response(status=400)
        if method == "initialize":
            result: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            body = {"jsonrpc": "2.0", "id": message["id"], "result": result}
            return web.json_response(body, headers={"Mcp-Session-Id": "s1"})
        if method == "tools/list":
            page = int(params.get("cursor", 0))
            result = {"tools": self.tools[page : page + 1]}
            if page + 1 < len(self.tools):
                result["nextCursor"] = str(page + 1)
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.called.set()
        await self.may_answer.wait()
        note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
        body = {"jsonrpc": "2.0", "id": message["id"], "result": self.result(params)}
        for each in (note, body):
            await answer.write(f"event: message\r\ndata: {json.dumps(each)}\r\n\r\n".encode())
        return answer

    def calls(self) -> list[dict[str, Any]]:
        return [params for method, params in self.heard if method == "tools/call"]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ToolServer]:
    tools = ToolServer()
    app = web.Application()

    async def moved(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/mcp")

    async def deleted(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_post("/mcp", tools.post)
    app.router.add_delete("/mcp", deleted)
    app.router.add_post("/moved", moved)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    tools.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    yield tools
    await runner.cleanup()


def answers(edge: Edge, *texts: str) -> None:
    """The model's turns, in their order; the last one again and again."""
    left = list(texts)
    edge.core.limit = 4000

    def script(request: Request) -> Any:
        text = left.pop(0) if len(left) > 1 else left[0]
        return text_steps(edge.tokenizer, text, finish=FinishReason.STOP, logprobs=request.sampling.logprobs)

    edge.core.script = script


async def started(start_edge: StartEdge, server: ToolServer, kept: object = None, **mcp: object) -> Edge:
    origin = server.url.removesuffix("/mcp")
    settings = {} if kept is None else {"kept": kept}
    return await start_edge(tool_call_parser="hermes", mcp={"allowed_servers": (origin,), **mcp}, **settings)


def tool(server: ToolServer, **fields: object) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "dice", "server_url": server.url, **fields}


def prompt_of(edge: Edge, index: int) -> str:
    return edge.tokenizer.decode(edge.core.running[index].request.prompt_token_ids, skip_special_tokens=False)


async def ask(edge: Edge, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await edge.client.post(PATH, json={"input": "Roll.", **body})
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_tools_are_listed_called_and_the_model_asked_again(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    given = tool(server, require_approval="never", authorization="secret", headers={"X-Team": "a"})
    answer = await ask(edge, tools=[given])
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["mcp_list_tools", "mcp_call", "message"]
    listed, call, message = answer["output"]
    assert [each["name"] for each in listed["tools"]] == ["roll", "erase"]
    assert (call["name"], json.loads(call["arguments"]), call["output"], call["error"]) == (
        "roll", {"sides": 6}, "4", None,
    )  # fmt: skip
    assert message["content"][0]["text"] == "It is 4."
    assert server.calls() == [{"name": "roll", "arguments": {"sides": 6}}]
    assert all(sent["Authorization"] == "Bearer secret" and sent["X-Team"] == "a" for sent in server.headers)
    assert "secret" not in json.dumps(answer)
    assert "<tool_response>\n4\n</tool_response>" in prompt_of(edge, 1)
    turns = [running.request for running in edge.core.running]
    assert answer["usage"]["input_tokens"] == sum(turn.num_prompt_tokens for turn in turns)

    # The next turn has the list, and does not ask for it again.
    num_heard = len(server.heard)
    again = await ask(edge, tools=[given], previous_response_id=answer["id"])
    assert [item["type"] for item in again["output"]] == ["message"]
    assert len(server.heard) == num_heard
    stored = (await edge.client.get(f"{PATH}/{answer['id']}")).json()
    assert stored["output"] == answer["output"]


async def test_streamed_the_events_bring_the_same_items(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    stream = await edge.openai.responses.create(
        model="",
        input="Roll.",
        stream=True,
        tools=[tool(server, require_approval="never")],  # type: ignore[list-item]
    )
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    for kind in ("response.mcp_call.in_progress", "response.mcp_call_arguments.done", "response.mcp_call.completed"):
        assert kinds.count(kind) == 1  # type: ignore[comparison-overlap]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert sorted(item.id or "" for item in done) == sorted(item.id or "" for item in last.response.output)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_reasoning_goes_with_the_call_that_it_led_to() -> None:
    def thought(text: str) -> InputItem:
        return InputItem.model_validate({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]})

    request = InputItem(type="mcp_approval_request", id="mcpr_1", name="roll", arguments="{}")
    refusal = InputItem(type="mcp_approval_response", approval_request_id="mcpr_1", approve=False)
    call = InputItem(type="mcp_call", name="roll", arguments="{}", output="4")
    own = InputItem(type="function_call", call_id="c", name="show", arguments="{}")
    said = InputItem(role="assistant", content="So.")
    for items, expected in (
        ([thought("a"), call, said], ["a", None, None]),
        ([thought("a"), call, thought("b"), said], ["a", None, "b"]),
        ([thought("a"), request, refusal, said], ["a", None, None]),
        ([thought("a"), said, thought("b"), own], ["a\n\nb"]),
        ([said, thought("b"), own], ["b"]),
    ):
        assert [message.get("reasoning_content") for message in item_messages(items, "input")] == expected


async def test_log_probabilities_are_those_of_the_turn_that_wrote_the_text(
    start_edge: StartEdge, server: ToolServer
) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    body = {"tools": [tool(server, require_approval="never")], "include": ["message.output_text.logprobs"]}
    answer = await ask(edge, **body)
    (part,) = answer["output"][-1]["content"]
    written = edge.tokenizer.encode("It is 4.", add_special_tokens=False)
    assert [entry["token"] for entry in part["logprobs"]] == [
        edge.tokenizer.token_text(token_id) for token_id in (*written, edge.tokenizer.eos_token_id)
    ]


async def test_by_default_a_call_waits_for_approval(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.", "Then not.")
    asked = await ask(edge, tools=[tool(server)])
    request = asked["output"][-1]
    assert (request["type"], request["name"], request["server_label"]) == ("mcp_approval_request", "roll", "dice")
    assert not server.calls()
    body = {"tools": [tool(server)], "previous_response_id": asked["id"]}
    response = {"type": "mcp_approval_response", "approval_request_id": request["id"]}
    approved = await ask(edge, **body, input=[{**response, "approve": True}])
    assert [item["type"] for item in approved["output"]] == ["mcp_call", "message"]
    assert (approved["output"][0]["output"], approved["output"][0]["approval_request_id"]) == ("4", request["id"])
    assert len(server.calls()) == 1
    assert "<tool_response>\n4\n</tool_response>" in prompt_of(edge, 1)
    await ask(edge, **body, input=[{**response, "approve": False, "reason": "Too risky."}])
    assert len(server.calls()) == 1
    assert "The user did not approve this call. Too risky." in prompt_of(edge, 2)
    for wrong in ({**response, "approval_request_id": "mcpr_1", "approve": True}, response):
        assert (await ask(edge, 400, **body, input=[wrong]))["error"]["param"] == "input"


async def test_filters_say_what_the_model_sees_and_what_needs_no_approval(
    start_edge: StartEdge, server: ToolServer
) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "ok")
    for allowed in (["roll"], {"read_only": True}, {"tool_names": ["roll", "other"]}):
        answer = await ask(edge, tools=[tool(server, allowed_tools=allowed)])
        assert [each["name"] for each in answer["output"][0]["tools"]] == ["roll"]
    answers(edge, CALL, "ok")
    only = {"never": {"read_only": True}}
    assert (await ask(edge, tools=[tool(server, require_approval=only)]))["output"][1]["type"] == "mcp_call"
    answers(edge, CALL, "ok")
    other = {"never": {"tool_names": ["erase"]}}
    answer = await ask(edge, tools=[tool(server, require_approval=other)])
    assert answer["output"][1]["type"] == "mcp_approval_request"


async def test_a_choice_of_allowed_tools_leaves_the_others_in_the_prompt(
    start_edge: StartEdge, server: ToolServer
) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL)
    functions = [{"type": "function", "name": name, "parameters": {}} for name in ("a", "b")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}
    answer = await ask(edge, tools=[*functions, tool(server)], tool_choice=choice)
    assert [item["type"] for item in answer["output"]] == ["mcp_list_tools", "function_call"]
    assert not server.calls(), "a call of what may not be called is for the client"
    assert all(f'"name": "{name}"' in prompt_of(edge, 0) for name in ("a", "b", "roll"))
    assert answer["tool_choice"] == choice
    choice = {**choice, "mode": "required", "tools": [{"type": "mcp", "server_label": "dice"}]}
    answers(edge, '[{"name": "roll", "parameters": {}}]', "ok")
    await ask(edge, tools=[*functions, tool(server)], tool_choice=choice)
    structure = edge.core.running[1].request.sampling.structured_output
    assert structure is not None
    assert '"roll"' in structure.text
    assert '"a"' not in structure.text
    choice["tools"] = [{"type": "function", "name": "c"}]
    assert (await ask(edge, 400, tools=functions, tool_choice=choice))["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "change",
    [
        {"server_url": "http://169.254.169.254/latest/meta-data"},
        {"server_url": "http://localhost:1/mcp"},
        {"server_url": "file:///etc/passwd"},
        {"server_url": "http://user:pass@127.0.0.1/"},
        {"server_url": None},
        {"server_label": None},
        {"headers": {"Host": "other"}},
        {"headers": {"X": "a\r\nY: b"}},
        {"headers": {"Mcp-Session-Id": "x"}},
        {"authorization": "a\nb"},
    ],
    ids=str,
)
async def test_what_is_not_allowed_is_refused_before_anything_is_sent(
    start_edge: StartEdge, server: ToolServer, change: dict[str, Any]
) -> None:
    edge = await started(start_edge, server)
    given = {name: value for name, value in tool(server, **change).items() if value is not None}
    assert (await ask(edge, 400, tools=[given]))["error"]["param"] == "tools"
    assert not server.heard
    closed = await start_edge()
    assert "no MCP server is allowed" in (await ask(closed, 400, tools=[tool(server)]))["error"]["message"]


async def test_a_server_that_fails_is_a_typed_error_or_an_item(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server, max_result_bytes=2048, max_calls=2)
    moved = server.url.replace("/mcp", "/moved")
    error = (await ask(edge, 424, tools=[tool(server, server_url=moved)]))["error"]
    assert (error["code"], error["param"]) == ("tool_server_failed", "tools")
    assert "status 307" in error["message"]

    never = tool(server, require_approval="never")
    results: list[tuple[dict[str, Any], str]] = [
        ({"content": [{"type": "text", "text": "no dice"}], "isError": True}, "no dice"),
        ({"content": [{"type": "text", "text": "x" * 4000}]}, "longer than 2048 bytes"),
    ]
    for result, said in results:
        server.result = lambda _, result=result: result  # type: ignore[misc]
        answers(edge, CALL, "Sorry.")
        call = (await ask(edge, tools=[never]))["output"][1]
        assert (call["status"], call["output"]) == ("failed", None)
        assert said in call["error"]

    server.result = lambda _: {"content": [{"type": "text", "text": "4"}]}
    answers(edge, CALL)  # a model that calls on and on
    output = (await ask(edge, tools=[never]))["output"]
    assert [item["error"] for item in output if item["type"] == "mcp_call"][:2] == [None, None]
    assert "at most 2 calls" in output[-1]["error"]
    server.tools = TOOLS[:1] * 2
    assert (await ask(edge, 400, tools=[never]))["error"]["param"] == "tools"
    server.tools = TOOLS[:1] * 400
    assert (await ask(edge, 424, tools=[never]))["error"]["code"] == "tool_server_failed"


async def test_of_a_result_the_text_is_passed_on_and_of_other_parts_their_kind(
    start_edge: StartEdge, server: ToolServer
) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    parts = [{"type": "image", "data": "AAAA", "text": "a die"}, {"type": "text", "text": "4"}]
    server.result = lambda _: {"content": parts}
    output = (await ask(edge, tools=[tool(server, require_approval="never")]))["output"][1]["output"]
    assert output == '{"type": "image", "omitted": "not text"}\n4'


async def test_all_turns_of_the_model_share_the_bound_on_output_tokens(
    start_edge: StartEdge, server: ToolServer
) -> None:
    edge = await started(start_edge, server)
    never = tool(server, require_approval="never")
    answers(edge, "It is 4.")
    num_second = (await ask(edge))["usage"]["output_tokens"]
    answers(edge, CALL, "It is 4.")
    num_first = (await ask(edge, tools=[never], max_output_tokens=500))["usage"]["output_tokens"] - num_second
    assert [each.request.sampling.max_tokens for each in edge.core.running[-2:]] == [500, 500 - num_first]
    num_asked = len(edge.core.running)
    answers(edge, CALL, "It is 4.")
    output = (await ask(edge, tools=[never], max_output_tokens=num_first))["output"]
    assert [item["type"] for item in output] == ["mcp_list_tools", "mcp_call"]
    assert len(edge.core.running) == num_asked + 1, "nothing is left for another turn"


async def approving(edge: Edge, server: ToolServer, **fields: object) -> dict[str, Any]:
    """The body of a request that approves the call for which the model has asked."""
    asked = await ask(edge, tools=[tool(server)])
    response = {"type": "mcp_approval_response", "approval_request_id": asked["output"][-1]["id"], "approve": True}
    return {"tools": [tool(server, **fields)], "previous_response_id": asked["id"], "input": [response]}


async def test_a_request_that_is_refused_makes_no_call(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    body = await approving(edge, server)
    fresh = {**body, "previous_response_id": None, "input": "Roll."}
    num_heard = len(server.heard)
    for given in (body, fresh):
        assert (await ask(edge, 404, **given, model="other"))["error"]["param"] == "model"
    assert len(server.heard) == num_heard, "no server is asked for a model that is not served"
    for wrong in (
        {"max_output_tokens": 100_000},
        {"top_p": 2.0},
        {"tool_choice": {"type": "function", "name": "x"}},
    ):
        await ask(edge, 400, **body, **wrong)
    assert not server.calls()
    assert (await ask(edge, **body))["output"][0]["output"] == "4"
    assert len(server.calls()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_behind_a_refusal_has_the_call_that_was_made(
    start_edge: StartEdge, server: ToolServer, stream: bool
) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    body = await approving(edge, server)
    answering = edge.core.script

    def full(_: Request) -> Any:
        raise Overloaded("the queue is full", retry_after_s=7.0)

    edge.core.script = full
    refused = await edge.client.post(PATH, json={**body, "stream": stream})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    edge.core.script = answering
    twice = {**body, "input": body["input"] * 2}
    assert [item["type"] for item in (await ask(edge, **twice))["output"]] == ["mcp_call", "message"]
    answer = await ask(edge, **body)
    assert (answer["output"][0]["output"], answer["output"][0]["error"]) == ("4", None)
    assert len(server.calls()) == 1


async def test_a_call_whose_client_left_is_not_made_again(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "Not known.")
    body = await approving(edge, server)
    server.may_answer.clear()
    leaving = asyncio.create_task(edge.client.post(PATH, json=body))
    await server.called.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    call = (await ask(edge, **body))["output"][0]
    assert (call["status"], call["output"]) == ("failed", None)
    assert "not made again" in call["error"]
    assert len(server.calls()) == 1
    assert len(edge.core.running) == 2, "the one that was left asked no model"
    server.may_answer.set()


async def test_what_is_kept_says_whether_a_call_is_made_again(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    asked = (await ask(edge, tools=[tool(server)]))["output"][-1]
    response = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
    body = {"tools": [tool(server)], "input": [asked, response], "store": False}
    assert (await ask(edge, **body))["output"][-2]["output"] == "4"
    again = (await ask(edge, **body))["output"][-2]
    assert "not made again" in again["error"], "store false keeps that it was made, and not what it brought"
    other = {**asked, "arguments": '{"sides": 20}'}
    assert (await ask(edge, **{**body, "input": [other, response]}))["output"][-2]["output"] == "4"
    assert len(server.calls()) == 2

    keepless = await started(start_edge, server, kept={"ttl_s": 0})
    answers(keepless, "It is 4.")
    for _ in range(2):
        assert (await ask(keepless, **body))["output"][-2]["output"] == "4"
    assert len(server.calls()) == 4


async def test_approved_calls_are_of_the_calls_of_a_response(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server, max_calls=1)
    answers(edge, CALL)
    output = (await ask(edge, **await approving(edge, server, require_approval="never")))["output"]
    assert [(item["type"], item["output"]) for item in output] == [("mcp_call", "4"), ("mcp_call", None)]
    assert "at most 1 calls" in output[1]["error"]
    assert len(server.calls()) == 1


async def test_the_longest_request_id_has_room_for_further_turns(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    answers(edge, CALL, "It is 4.")
    body = {"input": "Roll.", "tools": [tool(server, require_approval="never")]}
    answer = await edge.client.post(PATH, json=body, headers={"x-request-id": "r" * 128})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][-1]["content"][0]["text"] == "It is 4."
    assert edge.core.requests[1].request_id.endswith(".2")


async def test_half_a_surrogate_pair_of_a_server_is_a_question_mark(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server)
    server.result = lambda _: {"content": [{"type": "text", "text": "\ud83d \U0001f3b2"}]}
    server.tools = [{**TOOLS[0], "description": "Rolls \udfb2."}]
    answers(edge, CALL, "It is 4.")
    listed, call, _ = (await ask(edge, tools=[tool(server, require_approval="never")]))["output"]
    assert (listed["tools"][0]["description"], call["output"]) == ("Rolls ?.", "? \U0001f3b2")


async def test_all_lists_of_a_request_together_have_a_longest_size(start_edge: StartEdge, server: ToolServer) -> None:
    edge = await started(start_edge, server, max_result_bytes=2048)
    server.tools = [{**TOOLS[0], "description": "d" * 1200}]
    answers(edge, "ok")
    await ask(edge, tools=[tool(server)])
    both = [tool(server), tool(server, server_label="other")]
    assert "'other' are longer than 2048 bytes" in (await ask(edge, 424, tools=both))["error"]["message"]
    server.tools = [{"name": name, "description": "d" * 1200} for name in "ab"]  # on a page each
    assert "tools/list is longer" in (await ask(edge, 424, tools=[tool(server)]))["error"]["message"]


async def test_only_the_limits_end_the_wait_for_a_server(
    start_edge: StartEdge, server: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = await started(start_edge, server)
    answers(edge, "ok")
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=1e-6))
    await ask(edge, tools=[tool(server)])
