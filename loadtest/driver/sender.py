"""Runs one conversation: its turns in sequence, each with the target's own answers as history."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from loadtest.clients.base import Call, Client, RequestFailed, failed
from loadtest.driver.collector import Collector
from loadtest.records import Failure, FailureCause, RequestRecord
from loadtest.workloads.conversation import Conversation
from loadtest.workloads.tokens import TokenSource

_HALF_TIMER_S = 0.0005


@dataclass(slots=True)
class Prepared:
    """A turn that is ready to send."""

    record: RequestRecord
    token_ids: list[int]  # this turn's prompt, for the next turn; empty for the last turn
    payload: Any  # in the client's own form


class Sender:
    """Turns conversations into requests."""

    def __init__(
        self,
        client: Client,
        tokens: TokenSource,
        collector: Collector,
        run_id: str,
        request_timeout_s: float,
        ignore_eos: bool,
        models: Iterator[str] | None = None,
    ) -> None:
        """`models`: for each conversation; None: the client's."""
        self._client = client
        self._tokens = tokens
        self._collector = collector
        self._run_id = run_id
        self._timeout_s = request_timeout_s
        self._ignore_eos = ignore_eos
        self._models = repeat("") if models is None else models
        self._num_conversations = 0
        self._num_requests = 0

    def prepare(self, conversation: Conversation, due_s: float | None) -> Prepared:
        """The first turn, encoded in advance."""
        number = self._num_conversations
        self._num_conversations += 1
        return self._prepare_turn(conversation, 0, number, [], due_s, next(self._models))

    async def run(self, conversation: Conversation, first: Prepared) -> bool:
        """Sends all turns; returns whether all were answered. Failures go into the records and are not raised."""
        prepared = first
        for turn in range(1, len(conversation.turns) + 1):
            await self._send(prepared)
            record = prepared.record
            if record.failure is not None:
                self._drop_rest(conversation, record, f"turn {record.turn} failed: {record.failure.cause.value}")
                return False
            if turn == len(conversation.turns):
                break
            if not record.reply.counts_exact:
                self._drop_rest(conversation, record, "the target sends no token_ids to continue from")
                return False
            prepared = await self._next_turn(conversation, turn, prepared)
        return True

    async def _next_turn(self, conversation: Conversation, turn: int, previous: Prepared) -> Prepared:
        history = previous.token_ids + previous.record.reply.token_ids
        closed_s = previous.record.reply.closed_s
        due_s = None if closed_s is None else closed_s + conversation.turns[turn].think_s
        prepared = self._prepare_turn(
            conversation, turn, previous.record.conversation, history, due_s, previous.record.model
        )
        if due_s is not None:
            await sleep_until(self._collector, due_s)
        return prepared

    def _prepare_turn(
        self,
        conversation: Conversation,
        turn: int,
        number: int,
        history: Sequence[int],
        due_s: float | None,
        model: str,
    ) -> Prepared:
        asked = conversation.turns[turn]
        token_ids = [*history, *self._tokens.prompt(asked.spans)]
        index = self._num_requests
        self._num_requests += 1
        record = RequestRecord(
            index=index,
            request_id=f"{self._run_id}-{index}",
            num_prompt_tokens=len(token_ids),
            max_tokens=asked.num_output_tokens,
            due_s=due_s,
            conversation=number,
            turn=turn,
            model=model,
        )
        call = Call(record.request_id, token_ids, asked.num_output_tokens, self._ignore_eos, model)
        is_last = turn == len(conversation.turns) - 1
        return Prepared(record, [] if is_last else token_ids, self._client.encode(call))

    async def _send(self, prepared: Prepared) -> None:
        record = prepared.record
        self._collector.sent(record)
        error: RequestFailed | None = failed(FailureCause.INTERRUPTED, "the run was stopped")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.generate(prepared.payload, record.reply)
            error = None
        except RequestFailed as failure:
            error = failure
        except TimeoutError:
            error = failed(FailureCause.TIMEOUT, f"no complete answer within {self._timeout_s:g} s")
        finally:
            self._collector.finished(record, error)

    def _drop_rest(self, conversation: Conversation, broken: RequestRecord, reason: str) -> None:
        """The turns after a failed one count as offered: failing early must not look better than failing late."""
        for turn in range(broken.turn + 1, len(conversation.turns)):
            asked = conversation.turns[turn]
            record = RequestRecord(
                index=self._num_requests,
                request_id=f"{self._run_id}-{self._num_requests}",
                num_prompt_tokens=asked.num_new_tokens,
                max_tokens=asked.num_output_tokens,
                conversation=broken.conversation,
                turn=turn,
                model=broken.model,
            )
            self._num_requests += 1
            self._collector.never_sent(record, Failure(FailureCause.PREVIOUS_TURN, reason))


async def sleep_until(collector: Collector, at_s: float) -> None:
    """Returns at `at_s` of the run, or half a millisecond early: timers have a resolution of 1 ms, and polling through
    the rest would cost a tenth of the core at 200 requests a second."""
    while (left_s := at_s - collector.now_s) > _HALF_TIMER_S:  # noqa: ASYNC110 - time passes by itself
        await asyncio.sleep(left_s)
