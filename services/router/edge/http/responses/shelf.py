"""Responses and conversations that are kept for a tenant, as JSON records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.router.edge.http.responses.mcp.servers import Outcome
from services.router.edge.settings import KeptSettings
from shared.errors import InvalidRequest, NotFound, Overloaded, StoreUnavailable, brief
from shared.records.records import ALWAYS, MAX_RECORD_BYTES, Record, Records, Unless

Item = dict[str, Any]
MAX_TURNS = 512
"""Longest chain of responses."""
MAX_ID_LEN = 200
ENDED = ("completed", "incomplete", "failed", "cancelled")
LEASE_S = 15.0
"""A response in the background whose router has not renewed its lease for so long is lost. Seconds."""
UNKNOWN: Outcome = (None, "an earlier request began this call, and what came of it is not kept: it is not made again")
_ATTEMPTS = 16
"""To change a conversation that others change at the same time."""
_INLINE_BYTES = 1 << 16
"""Longer records are parsed in a thread."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response with what came in with it."""

    body: dict[str, Any]
    """OpenAI's `response` object."""
    input: Sequence[Item]
    """Items of the call itself."""
    chain: tuple[str, ...] = ()
    """Ids of the responses before it, oldest first."""
    stamp: bytes = b""
    """Stamp of the record."""

    @property
    def id(self) -> str:
        """`resp_…`."""
        return str(self.body["id"])

    @property
    def is_running(self) -> bool:
        """Whether the response has not ended."""
        return self.body["status"] not in ENDED


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation and all its items."""

    id: str
    created_at: int  # seconds since 1970
    metadata: Mapping[str, str]
    items: Sequence[Item]
    stamp: bytes = b""

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's `conversation` object."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
        }


class Shelf:
    """Every call is about one tenant, to whom the others' things do not exist. All raise StoreUnavailable."""

    def __init__(self, records: Records, settings: KeptSettings) -> None:
        self._records = records
        self._ttl_s = settings.ttl_s

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._ttl_s > 0

    def check_keeps(self, field: str) -> None:
        """Raises InvalidRequest (`field`) where nothing is kept."""
        if not self.keeps:
            raise InvalidRequest(f"{field}: nothing is kept here, edge.kept.ttl_s is 0", field=field)

    # Responses

    async def response(self, tenant: str, response_id: str, field: str = "response_id") -> KeptResponse:
        """Raises NotFound (`field`)."""
        [record] = await self._read(tenant, [f"resp:{_known(response_id, 'response', field)}"])
        if record is None:
            raise _missing("response", response_id, field)
        return record

    async def before(self, tenant: str, response_id: str, field: str) -> tuple[list[Item], tuple[str, ...]]:
        """All items up to a response and with it, and the ids of the chain that it ends. Raises NotFound (`field`)
        where one of them is gone, InvalidRequest where the last one has not ended or the chain is too long."""
        last = await self.response(tenant, response_id, field)
        if last.is_running:
            raise InvalidRequest(f"{field}: response {brief(response_id)!r} has not ended", field=field)
        if len(last.chain) >= MAX_TURNS - 1:
            raise InvalidRequest(
                f"{field}: the chain of responses has {MAX_TURNS} turns: begin a new one, or use a conversation",
                field=field,
                limit=MAX_TURNS,
            )
        earlier = await self._read(tenant, [f"resp:{each}" for each in last.chain])
        items: list[Item] = []
        for turn, turn_id in zip([*earlier, last], (*last.chain, last.id), strict=True):
            if turn is None:
                raise _missing("response", turn_id, field)
            items += [*turn.input, *turn.body["output"]]
        return items, (*last.chain, last.id)

    async def keep(self, tenant: str, response: KeptResponse, unless: Unless = ALWAYS) -> bytes | None:
        """Its stamp, or None where the condition kept it from being written. Raises InvalidRequest (`store`) for one
        that is too long."""
        content = {"response": response.body, "input": list(response.input), "chain": list(response.chain)}
        return await self._write(tenant, f"resp:{response.id}", content, unless, "store")

    async def drop(self, tenant: str, response_id: str) -> None:
        """Raises NotFound."""
        key = f"resp:{_known(response_id, 'response', 'response_id')}"
        if not await self._records.delete(tenant, [key]):
            raise _missing("response", response_id, "response_id")

    # Leases of responses that are computed in the background

    async def lease(self, tenant: str, response_id: str) -> bool:
        """False where another call or router holds the lease."""
        return await self._records.put(tenant, f"run:{response_id}", b"1", LEASE_S, Unless(exists=True)) is not None

    async def renew(self, tenant: str, response_id: str) -> bool:
        """Whether there is one; then it holds for LEASE_S from now on."""
        return await self._records.get(tenant, [f"run:{response_id}"], LEASE_S) != [None]

    async def is_leased(self, tenant: str, response_id: str) -> bool:
        """Whether a router holds the lease of this response, which it then still writes."""
        return await self._records.get(tenant, [f"run:{response_id}"]) != [None]

    async def release(self, tenant: str, response_id: str) -> None:
        """Ends a lease, also another router's, which stops computing."""
        await self._records.delete(tenant, [f"run:{response_id}"])

    # Calls of servers' tools that a client has approved

    async def claim_call(self, tenant: str, call: str) -> Outcome | None:
        """None for the one that is to make the call; for every later one what came of it, or UNKNOWN where that is not
        kept, or not yet."""
        key = f"call:{call}"
        begun = json.dumps(UNKNOWN).encode()
        if await self._records.put(tenant, key, begun, self._ttl_s, Unless(exists=True)) is not None:
            return None
        [record] = await self._records.get(tenant, [key])
        if record is None:
            return UNKNOWN
        output, error = json.loads(record.value)
        return output, error

    async def keep_call(self, tenant: str, call: str, outcome: Outcome) -> None:
        """What came of a claimed call. It has been made, so what cannot be kept is no error: it stays UNKNOWN."""
        with contextlib.suppress(StoreUnavailable, InvalidRequest):
            await self._records.put(tenant, f"call:{call}", json.dumps(outcome).encode(), self._ttl_s)

    # Conversations

    async def begin(self, tenant: str, items: Sequence[Item], metadata: Mapping[str, str]) -> Conversation:
        """A new conversation."""
        begun = Conversation(f"conv_{uuid.uuid4().hex}", int(time.time()), metadata, items)
        await self._write_conversation(tenant, begun, Unless(exists=True))
        return begun

    async def conversation(self, tenant: str, conversation_id: str, field: str = "conversation_id") -> Conversation:
        """Raises NotFound (`field`)."""
        key = f"conv:{_known(conversation_id, 'conversation', field)}"
        [record] = await self._records.get(tenant, [key], self._ttl_s)
        if record is None:
            raise _missing("conversation", conversation_id, field)
        content = json.loads(record.value)
        return Conversation(conversation_id, content["created_at"], content["metadata"], content["items"], record.stamp)

    async def change(
        self,
        tenant: str,
        conversation_id: str,
        change: Callable[[Conversation], Conversation],
        field: str = "conversation_id",
    ) -> Conversation:
        """The conversation after `change`, which is called again where another writer has changed it meanwhile. Raises
        NotFound (`field`), Overloaded where too many change it at once."""
        for _ in range(_ATTEMPTS):
            before = await self.conversation(tenant, conversation_id, field)
            after = change(before)
            if await self._write_conversation(tenant, after, Unless(changed_from=before.stamp)):
                return after
        raise Overloaded(f"conversation {brief(conversation_id)!r} is changed by many calls at once", field=field)

    async def end(self, tenant: str, conversation_id: str) -> None:
        """Deletes a conversation and its items. Raises NotFound."""
        key = f"conv:{_known(conversation_id, 'conversation', 'conversation_id')}"
        if not await self._records.delete(tenant, [key]):
            raise _missing("conversation", conversation_id, "conversation_id")

    async def _write_conversation(self, tenant: str, conversation: Conversation, unless: Unless) -> bytes | None:
        content = {
            "created_at": conversation.created_at,
            "metadata": dict(conversation.metadata),
            "items": list(conversation.items),
        }
        return await self._write(tenant, f"conv:{conversation.id}", content, unless, "items")

    # Records

    async def _read(self, tenant: str, keys: Sequence[str]) -> list[KeptResponse | None]:
        records = await self._records.get(tenant, keys, self._ttl_s)
        if sum(len(record.value) for record in records if record is not None) <= _INLINE_BYTES:
            return _parsed(records)
        return await asyncio.to_thread(_parsed, records)

    async def _write(
        self, tenant: str, key: str, content: Mapping[str, object], unless: Unless, field: str
    ) -> bytes | None:
        self.check_keeps(field)
        try:
            return await self._records.put(tenant, key, json.dumps(content).encode(), self._ttl_s, unless)
        except InvalidRequest as error:
            if error.field != "value":
                raise
            limit = error.details.get("limit", MAX_RECORD_BYTES)
            raise InvalidRequest(
                f"{field}: what is to be kept is longer than {limit} bytes", field=field, limit=limit
            ) from None


def _known(given: str, what: str, field: str) -> str:
    """The id, where it can be one."""
    if not given or len(given) > MAX_ID_LEN or not given.isascii() or not given.isprintable():
        raise _missing(what, given, field)
    return given


def _missing(what: str, given: str, field: str) -> NotFound:
    return NotFound(f"there is no {what} {brief(given, 100)!r}", field=field, value=brief(given, 100))


def _parsed(records: Sequence[Record | None]) -> list[KeptResponse | None]:
    return [None if record is None else _response(record) for record in records]


def _response(record: Record) -> KeptResponse:
    content = json.loads(record.value)
    return KeptResponse(content["response"], content["input"], tuple(content["chain"]), record.stamp)
