"""The dialect of the Responses API over the chat's: a request as one of the chat, a response as events or as a body."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.answer.events import Content
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.openai.chat import Chat, ParsedChat
from services.router.edge.http.responses.inner import NAMES, callable_names, chat_request
from services.router.edge.http.responses.items import OutputItems, kept_items
from services.router.edge.http.responses.mcp.servers import Servers, ToolBox
from services.router.edge.http.responses.schemas import AllowedTools, InputItem, ResponseRequest, parse_response
from services.router.edge.http.responses.shelf import UNKNOWN, Item, KeptResponse, Shelf
from services.router.edge.http.responses.tools import ApprovedCall, approved_calls, list_tools
from services.router.edge.output_stream import OutputDelta, OutputFinish, Usage
from shared.records.records import ALWAYS, Unless


class Responses:
    """The endpoint's dialect, over the chat's."""

    errors = OpenAIErrors(NAMES)

    def __init__(self, chat: Chat, servers: Servers) -> None:
        """`servers`: MCP servers that requests may name."""
        self._chat = chat
        self.servers = servers

    def parse(self, body: bytes) -> ParsedResponse:
        """Raises InvalidRequest naming the field."""
        request = parse_response(body)
        return self._parsed(request, (), self.servers.of(request.tools or ()))

    def _parsed(
        self, request: ResponseRequest, earlier: Sequence[InputItem], box: ToolBox, later: Sequence[Item] = ()
    ) -> ParsedResponse:
        read = [InputItem.model_validate(item) for item in later]
        inner = chat_request(request, earlier, read, box.tools)
        chat = self._chat.parsed(inner, callable_names(request, box.tools))
        # The usage counts tokens of reasoning, and log-probabilities are the text's alone.
        options = replace(chat.options, text=replace(chat.options.text, is_by_token=True))
        return ParsedResponse.of(replace(chat, options=options), original=request, earlier=earlier, box=box)

    def again(self, call: ParsedResponse, items: Sequence[Item], max_tokens: int | None) -> ParsedResponse:
        """The same call behind the items that it has brought so far, for at most `max_tokens` further tokens. A tool
        call that the client required has been made: the next one is the model's choice."""
        choice = call.original.tool_choice
        if isinstance(choice, AllowedTools):
            choice = choice.model_copy(update={"mode": "auto"})
        elif choice != "none":
            choice = "auto"
        request = call.original.model_copy(update={"max_output_tokens": max_tokens, "tool_choice": choice})
        return self._parsed(request, call.earlier, call.box, items).instead_of(call)

    async def continued(
        self, body: bytes, shelf: Shelf, tenant: str, check_model: Callable[[str, str], None]
    ) -> ParsedResponse:
        """The request behind what it refers to. `check_model`: see `InputProcessor`; it comes before any server is
        asked. Raises NotFound, ToolServerFailed, and InvalidRequest naming the field."""
        request, earlier, chain = parse_response(body), list[Item](), tuple[str, ...]()
        for name in ("background", "store", "previous_response_id", "conversation"):
            if getattr(request, name):
                shelf.check_keeps(name)
        if request.previous_response_id is not None:
            earlier, chain = await shelf.before(tenant, request.previous_response_id, "previous_response_id")
        elif request.conversation_id is not None:
            earlier = list((await shelf.conversation(tenant, request.conversation_id, "conversation")).items)
        read = [InputItem.model_validate(item) for item in earlier]
        box = self.servers.of(request.tools or ())
        approved: list[ApprovedCall] = []
        if box.servers:
            check_model(request.model or "", tenant)
            await list_tools(box, request, read)
            approved = approved_calls(box, request, read, self.servers.max_calls)
        # The approved calls are made once all else is known to be right; until then their place is held.
        parsed = self._parsed(request, read, box, [call.item(UNKNOWN) for call in approved])
        return replace(
            parsed,
            brought=box.listings,
            approved=approved,
            is_kept=shelf.keeps and request.store is not False,
            tenant=tenant,
            chain=chain,
        )

    async def with_calls(self, call: ParsedResponse, shelf: Shelf) -> ParsedResponse:
        """The call, continued behind the results of the tool calls that the client approved."""
        made = [await each.made(shelf, call.tenant, is_kept=call.is_kept) for each in call.approved]
        parsed = self._parsed(call.original, call.earlier, call.box, made).instead_of(call)
        return replace(parsed, brought=[*call.brought, *made], num_made=len(made))


@dataclass(frozen=True, slots=True)
class ParsedResponse(ParsedChat):
    """See `ParsedRequest`."""

    original: ResponseRequest
    tenant: str = ""
    is_kept: bool = False  # the response is kept
    chain: tuple[str, ...] = ()  # ids of the responses before it
    earlier: Sequence[InputItem] = ()  # items of the conversation before it
    box: ToolBox = field(default_factory=lambda: ToolBox({}))
    brought: Sequence[Item] = ()  # items of its output that there are before the model is asked
    approved: Sequence[ApprovedCall] = ()  # calls that are still to be made before that
    num_made: int = 0  # such calls that were made
    unless: Unless = ALWAYS  # when it is not kept after all

    def instead_of(self, call: ParsedResponse) -> ParsedResponse:
        """This one with what is known of another form of the same call: what was asked, and where it is kept."""
        return replace(
            self,
            original=call.original,
            is_kept=call.is_kept,
            tenant=call.tenant,
            chain=call.chain,
            unless=call.unless,
        )

    def own_session(self, response_id: str) -> str:
        """Session id that all turns of the response's conversation have."""
        return self.original.conversation_id or (self.chain[0] if self.chain else response_id)

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> ResponseWriter:
        """See `ParsedRequest`."""
        return ResponseWriter(self, plan, request_id)

    def body_writer(self, plan: Sequence[Request], request_id: str) -> ResponseWriter:
        """See `ParsedRequest`."""
        return ResponseWriter(self, plan, request_id)


def response_id_of(request_id: str) -> str:
    """The id of the response that a request brings."""
    return f"resp_{request_id}"


def _of_last(deltas: Sequence[tuple[int, list[object]]], num_characters: int) -> list[object]:
    """The log-probabilities of the deltas that brought the last `num_characters`, each as its number of characters and
    its log-probabilities; one without characters belongs to the one behind it."""
    start = len(deltas)
    while start and (num_characters > 0 or (start < len(deltas) and not deltas[start - 1][0])):
        start -= 1
        num_characters -= deltas[start][0]
    return [entry for _, logprobs in deltas[start:] for entry in logprobs]


class ResponseWriter:
    """A response as events and as one body: both are the same items."""

    def __init__(self, call: ParsedResponse, plan: Sequence[Request], request_id: str) -> None:
        self._call = call
        self._id = response_id_of(request_id)
        self._model = plan[0].adapter_name or call.dialect.model_name
        self._created_at = int(time.time())
        (self._answer,) = call.dialect.answers(plan, call.tools)
        callable_names = call.tools.names if call.tools is not None else frozenset[str]()
        self._items = OutputItems({name: tool for name, tool in call.box.tools.items() if name in callable_names})
        self._num_turn_items = 0  # before the present turn of the model
        self._usages: list[Usage] = []  # of the turns before
        self._begun = False
        self._finish: OutputFinish | None = None
        self._num_reasoning_tokens = 0
        self._held: list[tuple[int, list[object]]] = []  # characters and log-probabilities of deltas that gave no event

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events that a delta brings."""
        assert index == 0, "a response has one answer"
        events = self.begin()
        found = self._answer.add(delta)
        if self._answer.only_reasons:
            self._num_reasoning_tokens += len(delta.token_ids)
        if self._call.body.logprobs:
            self._held.append((len(delta.text), self._call.dialect.logprobs(delta)))
        logprobs = _of_last(self._held, sum(len(event.text) for event in found if isinstance(event, Content)))
        for event in found:
            events += self._items.add(event, self._answer.calls, logprobs)
            if isinstance(event, Content):
                logprobs = []
        if found:
            self._held.clear()
        if delta.finish is not None:
            self._finish = delta.finish
            events += self._items.end_text([entry for _, logprobs in self._held for entry in logprobs])
        return events

    def begin(self) -> bytes:
        """The first events, and what there is before the model is asked; none where they were given."""
        if self._begun:
            return b""
        self._begun = True
        response = self.response("in_progress")
        events = self._items.event("response.created", response=response)
        events += self._items.event("response.in_progress", response=response)
        for item in self._call.brought:
            events += self._items.whole(item)
        self._num_turn_items = len(self._items.items)
        return events

    def end_turn(self) -> bytes:
        """The model has ended its turn."""
        return self._items.close(self.status)

    @property
    def items(self) -> list[Item]:
        """The output items made until now."""
        return self._items.items

    @property
    def waiting_calls(self) -> list[Item]:
        """Calls of servers' tools that are still to be made."""
        return self._items.waiting_calls

    def called(self, item: Item, output: str | None, error: str | None) -> bytes:
        """Ends a waiting call of a server's tool with its output or error; returns the events of it."""
        return self._items.called(item, output, error)

    @property
    def needs_another_turn(self) -> bool:
        """Whether the model is asked again: its turn was whole, it called tools of servers, and nothing waits for the
        client."""
        kinds = {str(item["type"]) for item in self._items.items[self._num_turn_items :]}
        is_over = "mcp_call" not in kinds or bool(kinds & {"function_call", "mcp_approval_request"})
        left = self.max_tokens_left
        return not is_over and self.status == "completed" and (left is None or left > 0)

    @property
    def max_tokens_left(self) -> int | None:
        """What is left of `max_output_tokens`; None where it is not set."""
        limit = self._call.original.max_output_tokens
        return None if limit is None else limit - sum(usage.num_output_tokens for usage in self._all_usages())

    def ask_again(self, call: ParsedResponse, plan: Sequence[Request]) -> None:
        """The model's next turn begins."""
        assert self._finish is not None
        self._usages.append(self._finish.usage)
        self._finish = None
        self._held.clear()
        self._num_turn_items = len(self._items.items)
        (self._answer,) = call.dialect.answers(plan, call.tools)

    def _all_usages(self) -> list[Usage]:
        return self._usages if self._finish is None else [*self._usages, self._finish.usage]

    def closing(self) -> bytes:
        """The end of the last item, and the whole response."""
        status = self.status
        events = self._items.close(status)
        return events + self._items.event(f"response.{status}", response=self.response(status))

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes a delta of a reply that is one body."""
        self.events(index, delta)

    def body(self) -> bytes:
        """OpenAI's `response` object."""
        status = self.status
        self._items.close(status)
        return json.dumps(self.response(status)).encode()

    def kept(self, status: str) -> KeptResponse:
        """The response as it is kept, with the items that came in."""
        return KeptResponse(self.response(status), kept_items(self._call.original.items), self._call.chain)

    @property
    def status(self) -> str:
        """How the answer ended."""
        assert self._finish is not None, "the answer has not ended"
        return "incomplete" if self._finish.reason is FinishReason.LENGTH else "completed"

    def response(self, status: str) -> dict[str, Any]:
        """OpenAI's `response` object."""
        request = self._call.original
        sampling = self._call.sampling
        given = request.model_dump(exclude_none=True, by_alias=True, include={"tools", "text", "reasoning"})
        text: dict[str, Any] = {"format": {"type": "text"}, **given.get("text", {})}
        choice = request.tool_choice
        conversation = request.conversation_id
        response: dict[str, Any] = {
            "background": bool(request.background),
            "conversation": {"id": conversation} if conversation is not None else None,
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": self._items.items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "service_tier": request.service_tier or "auto",
            "store": self._call.is_kept,
            "temperature": sampling.temperature,
            "text": text,
            "tool_choice": choice or "auto"
            if choice is None or isinstance(choice, str)
            else choice.model_dump(exclude_none=True),
            "tools": [_without_secrets(tool) for tool in given.get("tools", [])],
            "top_p": sampling.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
        if self._finish is not None and status != "in_progress":
            usages = self._all_usages()
            num_prompt = sum(usage.num_prompt_tokens for usage in usages)
            num_output = sum(usage.num_output_tokens for usage in usages)
            response["completed_at"] = int(time.time())
            response["usage"] = {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in usages)},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": num_prompt + num_output,
            }
        return response


def _without_secrets(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name not in ("authorization", "headers")}
