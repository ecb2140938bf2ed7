"""The endpoint of the Responses API: responses that are kept, computed in the background, or call servers' tools."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.types import Message

from services.router.dispatch.request import Request
from services.router.edge.http.endpoint import BodyWriter, InferenceEndpoint, ParsedRequest, Reply, StreamWriter
from services.router.edge.http.responses.background import Background
from services.router.edge.http.responses.conversations import with_items
from services.router.edge.http.responses.dialect import ParsedResponse, Responses, ResponseWriter, response_id_of
from services.router.edge.http.responses.shelf import Item, Shelf
from services.router.edge.input_processor import MAX_REQUEST_ID_LEN, CallInfo, InputProcessor
from services.router.edge.request_ledger import CallEntry
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.edge.tenants.rate_limits import Account
from shared.errors import Cancelled
from shared.records.records import Unless


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
        return await self._responses.continued(body, self._shelf, tenant, self._input_processor.check_model)

    async def _serve(
        self, parsed: ParsedRequest, info: CallInfo, reply: Reply, account: Account, entry: CallEntry
    ) -> None:
        """See `InferenceEndpoint`."""
        assert isinstance(parsed, ParsedResponse)
        if parsed.approved:
            await self._plan(parsed, info)  # what is refused for any reason is refused before a call is made
            parsed = await self._responses.with_calls(parsed, self._shelf)
        session = info.scheduling.session or parsed.own_session(response_id_of(info.request_id))
        info = replace(info, scheduling=replace(info.scheduling, session=session))
        if not parsed.original.background:
            await super()._serve(parsed, info, reply, account, entry)
            return
        plan = await self._plan(parsed, info)
        begun = ResponseWriter(parsed, plan, info.request_id)

        async def compute(stamp: bytes) -> None:
            behind = CallEntry(self._input_processor.ledger, time.perf_counter())
            behind.answers_begin()
            unchanged = replace(parsed, unless=Unless(changed_from=stamp))
            await self._run(
                unchanged, plan, info, Reply(_nowhere, info.request_id, self._dialect.errors), account, behind
            )

        await self._background.begin(parsed.tenant, begun.kept("in_progress"), compute)
        entry.answers_begin()
        await reply.json(json.dumps(begun.response("queued")).encode())

    async def _run(
        self,
        parsed: ParsedRequest,
        plan: Sequence[Request],
        info: CallInfo,
        reply: Reply,
        account: Account,
        entry: CallEntry,
    ) -> None:
        """See `InferenceEndpoint`. With tools of servers the model is asked again behind what they returned."""
        assert isinstance(parsed, ParsedResponse)
        if not parsed.box.servers:
            await super()._run(parsed, plan, info, reply, account, entry)
            return
        entry.answers_begin()
        call, writer = parsed, ResponseWriter(parsed, plan, info.request_id)
        num_calls_left = self._responses.servers.max_calls - parsed.num_made

        async def send(events: bytes) -> None:
            if parsed.stream and events:
                if not reply.streaming:
                    await reply.open_stream()
                await reply.events(events)

        # The head goes out with the first delta: until then an error still has its own status.
        for turn in itertools.count(2):
            account.charge(sum(request.num_input_tokens for request in plan))
            async with self._input_processor.start(plan, entry) as outputs:
                try:
                    async for index, delta in outputs:
                        await send(writer.events(index, delta))
                finally:
                    account.charge(outputs.num_output_tokens)
            await send(writer.end_turn())
            is_spent = False
            for item in writer.waiting_calls:
                is_spent = num_calls_left == 0
                output, error = (None, self._too_many_calls) if is_spent else await _called(call, item)
                num_calls_left -= not is_spent
                await send(writer.called(item, output, error))
            if is_spent or not writer.needs_another_turn:
                break
            call = self._responses.again(call, writer.items, writer.max_tokens_left)
            plan = await self._plan(call, replace(info, request_id=turn_id(info.request_id, turn)))
            writer.ask_again(call, plan)
        if parsed.stream:
            events = writer.closing()
            await self._ended(parsed, writer)
            await reply.events(events, last=True)
        else:
            body = writer.body()
            await self._ended(parsed, writer)
            await reply.json(body)

    @property
    def _too_many_calls(self) -> str:
        return f"at most {self._responses.servers.max_calls} calls are made for a response"

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


def turn_id(request_id: str, turn: int) -> str:
    """The id of a later turn of the model; behind a long one's digest where the two together were too long."""
    found = f"{request_id}.{turn}"
    return found if len(found) <= MAX_REQUEST_ID_LEN else f"{hashlib.sha256(request_id.encode()).hexdigest()}.{turn}"


async def _called(call: ParsedResponse, item: Item) -> tuple[str | None, str | None]:
    """Calls a server's tool; (its output, what went wrong), one of them None."""
    server = call.box.servers[str(item["server_label"])]
    return await server.call(str(item["name"]), str(item["arguments"]))


async def _nowhere(_: Message) -> None:
    """ASGI's `send` of a response that is computed in the background: drops the messages."""
