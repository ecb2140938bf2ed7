"""The endpoint, its dialect and its writers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Message

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.answer.events import Content, Reasoning
from services.router.edge.http.endpoint import BodyWriter, InferenceEndpoint, ParsedRequest, Reply, StreamWriter
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.openai.chat import Chat, ParsedChat
from services.router.edge.http.responses.background import Background
from services.router.edge.http.responses.conversations import with_items
from services.router.edge.http.responses.inner import NAMES, chat_request
from services.router.edge.http.responses.items import OutputItems, kept_items
from services.router.edge.http.responses.schemas import InputItem, ResponseRequest, ToolName, parse_response
from services.router.edge.http.responses.shelf import Item, KeptResponse, Shelf
from services.router.edge.input_processor import CallInfo, InputProcessor
from services.router.edge.output_stream import OutputDelta, OutputFinish
from services.router.edge.request_ledger import CallEntry
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.edge.tenants.rate_limits import Account
from shared.errors import Cancelled
from shared.records.records import ALWAYS, Unless


class Responses:
    """The endpoint's dialect, over the chat's."""

    errors = OpenAIErrors(NAMES)

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def parse(self, body: bytes) -> ParsedResponse:
        """Raises InvalidRequest naming the field."""
        return self._parsed(parse_response(body), ())

    def _parsed(self, request: ResponseRequest, earlier: Sequence[Item]) -> ParsedResponse:
        read = [InputItem.model_validate(item) for item in earlier]
        return ParsedResponse.of(self._chat.parsed(chat_request(request, read)), original=request)

    async def continued(self, body: bytes, shelf: Shelf, tenant: str) -> ParsedResponse:
        """The request behind what it refers to. Raises NotFound, and InvalidRequest naming the field."""
        request, earlier, chain = parse_response(body), list[Item](), tuple[str, ...]()
        for field in ("background", "store", "previous_response_id", "conversation"):
            if getattr(request, field):
                shelf.check_keeps(field)
        if request.previous_response_id is not None:
            earlier, chain = await shelf.before(tenant, request.previous_response_id, "previous_response_id")
        elif request.conversation_id is not None:
            earlier = list((await shelf.conversation(tenant, request.conversation_id, "conversation")).items)
        parsed = self._parsed(request, earlier)
        return replace(parsed, is_kept=shelf.keeps and request.store is not False, tenant=tenant, chain=chain)


@dataclass(frozen=True, slots=True)
class ParsedResponse(ParsedChat):
    """See `ParsedRequest`."""

    original: ResponseRequest
    tenant: str = ""
    is_kept: bool = False  # the response is kept
    chain: tuple[str, ...] = ()  # ids of the responses before it
    unless: Unless = ALWAYS  # when it is not kept after all

    def own_session(self, response_id: str) -> str:
        """What the turns of its conversation share."""
        return self.original.conversation_id or (self.chain[0] if self.chain else response_id)

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> ResponseWriter:
        """See `ParsedRequest`."""
        return ResponseWriter(self, plan, request_id)

    def body_writer(self, plan: Sequence[Request], request_id: str) -> ResponseWriter:
        """See `ParsedRequest`."""
        return ResponseWriter(self, plan, request_id)


class ResponsesEndpoint(InferenceEndpoint):
    """The endpoint with what it keeps."""

    def __init__(
        self,
        input_processor: InputProcessor,
        dialect: Responses,
        keys: ApiKeys,
        settings: EdgeSettings,
        shelf: Shelf,
        background: Background,
    ) -> None:
        super().__init__(input_processor, dialect, keys, settings)
        self._responses = dialect
        self._shelf = shelf
        self._background = background

    async def _parsed(self, body: bytes, tenant: str) -> ParsedRequest:
        """See `InferenceEndpoint`."""
        return await self._responses.continued(body, self._shelf, tenant)

    async def _serve(
        self, parsed: ParsedRequest, info: CallInfo, reply: Reply, account: Account, entry: CallEntry
    ) -> None:
        """See `InferenceEndpoint`."""
        assert isinstance(parsed, ParsedResponse)
        session = info.scheduling.session or parsed.own_session(response_id_of(info.request_id))
        info = replace(info, scheduling=replace(info.scheduling, session=session))
        if not parsed.original.background:
            await super()._serve(parsed, info, reply, account, entry)
            return
        plan = await self._plan(parsed, info)
        begun = ResponseWriter(parsed, plan, info.request_id)
        entry.answers_begin()

        async def compute(stamp: bytes) -> None:
            behind = CallEntry(self._input_processor.ledger, time.perf_counter())
            behind.answers_begin()
            told = replace(parsed, unless=Unless(changed_from=stamp))
            await self._run(told, plan, info, Reply(_nowhere, info.request_id, self._dialect.errors), account, behind)

        await self._background.begin(parsed.tenant, begun.kept("in_progress"), compute)
        await reply.json(json.dumps(begun.response("queued")).encode())

    async def _ended(self, parsed: ParsedRequest, writer: StreamWriter | BodyWriter) -> None:
        """See `InferenceEndpoint`."""
        assert isinstance(parsed, ParsedResponse)
        assert isinstance(writer, ResponseWriter)
        conversation = parsed.original.conversation_id
        if not parsed.is_kept and conversation is None:
            return
        kept = writer.kept(writer.status)
        if parsed.is_kept and await self._shelf.keep(parsed.tenant, kept, parsed.unless) is None:
            raise Cancelled(f"response {kept.id} was cancelled")
        if conversation is not None:
            added = [*kept.input, *kept.body["output"]]
            await self._shelf.change(
                parsed.tenant, conversation, lambda before: with_items(before, added), "conversation"
            )


async def _nowhere(_: Message) -> None:
    """ASGI's `send` of a response that is computed in the background: drops the messages."""


def response_id_of(request_id: str) -> str:
    """The id of the response that a request brings."""
    return f"resp_{request_id}"


class ResponseWriter:
    """A response as events and as one body: both are the same items."""

    def __init__(self, call: ParsedResponse, plan: Sequence[Request], request_id: str) -> None:
        self._call = call
        self._id = response_id_of(request_id)
        self._model = plan[0].adapter_name or call.dialect.model_name
        self._created_at = int(time.time())
        (self._answer,) = call.dialect.answers(plan, call.tools)
        self._items = OutputItems()
        self._begun = False
        self._finish: OutputFinish | None = None
        self._num_reasoning_tokens = 0
        self._logprobs: list[object] = []  # of tokens whose text is held back

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events that a delta brings."""
        assert index == 0, "a response has one answer"
        events = b""
        if not self._begun:
            self._begun = True
            response = self.response("in_progress")
            events = self._items.event("response.created", response=response)
            events += self._items.event("response.in_progress", response=response)
        found = self._answer.add(delta)
        if not self._answer.text and not self._answer.calls and self._answer.reasoning:
            self._num_reasoning_tokens += len(delta.token_ids)
        if self._call.body.logprobs and not all(isinstance(event, Reasoning) for event in found):
            self._logprobs += self._call.dialect.logprobs(delta)
        for event in found:
            logprobs: list[object] = []
            if isinstance(event, Content):
                logprobs, self._logprobs = self._logprobs, []
            events += self._items.add(event, self._answer.calls, logprobs)
        if delta.finish is not None:
            self._finish = delta.finish
        return events

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
            "tool_choice": choice.model_dump() if isinstance(choice, ToolName) else choice or "auto",
            "tools": given.get("tools", []),
            "top_p": sampling.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
        if self._finish is not None and status != "in_progress":
            usage = self._finish.usage
            response["completed_at"] = int(time.time())
            response["usage"] = {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
                "output_tokens": usage.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            }
        return response
