"""A running answer that moves: what each worker is sent, and that the client gets every token once."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.dispatch.record import RequestEvent, RequestState
from services.router.placement.moves import MoveCause
from services.router.placement.views import Work
from services.router.views.moves import MoveOutcome, move_accounts
from shared.errors import (
    InvalidRequest,
    NumericalFault,
    Overloaded,
    Quarantined,
    TransferFailed,
    WorkerDied,
    WorkerLost,
)
from shared.kv.groups import KVGroups
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.unit.router.dispatch.attempt_rig import PROMPT, Link, Rig

STOP = types_pb2.FINISH_REASON_STOP
OLD = "r#1.1"


class MoveRig(Rig):
    """An answer with two tokens that moves from d0 to d1, blocks of 16 tokens."""

    def __init__(self, **sampling: Any) -> None:
        super().__init__(collocated=True, **{"max_tokens": 50, **sampling})
        self.next = Link("d1")

    async def begin(self) -> None:
        await self.submitted()
        self.decoded(1)
        self.decoded(2)
        self.move()

    def move(self) -> None:
        self.attempt.move(self.next, MoveCause.DRAIN, KVGroups(16))  # type: ignore[arg-type]

    def from_next(self, *token_ids: int, **fields: Any) -> None:
        self.attempt.receive(self.next, types_pb2.SequenceTokens(token_ids=token_ids, **fields))  # type: ignore[arg-type]

    def fails(self, link: Link, error: Exception) -> None:
        if isinstance(error, WorkerLost):
            link.connected, link.welcome = False, None
        self.attempt.receive(link, error)  # type: ignore[arg-type]

    @property
    def state(self) -> RequestState:
        return self.active.state

    @property
    def outcomes(self) -> list[MoveOutcome | None]:
        return [account.outcome for account in move_accounts(self.active.record)]

    def has_left(self, link: Link, name: str) -> bool:
        """Whether the worker was told that the sequence ended, and is not listened to any more."""
        return ("close", name) in link.calls and ("cancel", name, {}) in link.calls

    def close(self) -> None:
        self.attempt.release()
        self.running.cancel()


@pytest.fixture
async def rig():
    made = MoveRig()
    await made.begin()
    yield made
    made.close()


async def test_the_next_worker_gets_the_tokens_so_far_and_the_old_ones_sealed_blocks(rig: MoveRig) -> None:
    assert rig.state is RequestState.COPYING
    [reserve] = rig.next.sent
    assert (reserve.request_id, reserve.prefill_here, reserve.num_prompt_tokens) == ("r#1.1.m1", True, len(PROMPT))
    assert [(peer.address, peer.num_blocks) for peer in reserve.peers] == [("d0:1", 6)]
    assert reserve.num_stored_blocks == 0
    assert rig.next.reserved == [[*PROMPT, 1, 2]]
    assert rig.next.calls[0][3] == 7  # 102 tokens and one more
    assert rig.next.calls[0][2] == Work.of(102 - 96, 96)
    assert not any(call[0] == "cancel" for call in rig.decode.calls)


async def test_it_switches_at_the_next_workers_first_token_and_drops_what_the_client_has(rig: MoveRig) -> None:
    rig.decoded(3)
    rig.decoded(4)
    assert rig.active.produced == [1, 2, 3, 4]  # the old one streams on
    rig.from_next(3)
    assert rig.state is RequestState.REPEATING
    assert rig.has_left(rig.decode, OLD)
    assert rig.attempt.decode.name == rig.active.record.decode_worker == "d1"
    rig.from_next(4)
    assert (rig.active.produced, rig.state) == ([1, 2, 3, 4], RequestState.REPEATING)
    rig.from_next(5)
    assert (rig.active.produced, rig.state) == ([1, 2, 3, 4, 5], RequestState.DECODING)
    rig.from_next(6, finish_reason=STOP)
    assert await rig.ended() is None
    assert rig.active.produced == [1, 2, 3, 4, 5, 6]
    assert rig.outcomes == [MoveOutcome.MOVED]
    assert not any(call[0] == "cancel" for call in rig.next.calls)


async def test_a_next_worker_that_is_ahead_of_the_old_one_catches_up_at_once(rig: MoveRig) -> None:
    rig.from_next(3)
    assert (rig.active.produced, rig.state) == ([1, 2, 3], RequestState.DECODING)
    assert [entry.event for entry in rig.active.record.entries[-3:]] == [
        RequestEvent.MOVE, RequestEvent.SWITCHED, RequestEvent.CAUGHT_UP,
    ]  # fmt: skip


async def test_a_next_worker_far_behind_is_asked_once_more_and_then_taken(rig: MoveRig) -> None:
    rig.decoded(3, 4, 5, 6, 7)
    rig.from_next(3)
    assert rig.state is RequestState.CLOSING_UP
    assert rig.has_left(rig.next, "r#1.1.m1")
    again = rig.next.sent[-1]
    assert (again.request_id, list(again.peers)) == ("r#1.1.m2", [])
    assert rig.next.reserved[-1] == [*PROMPT, 1, 2, 3, 4, 5, 6, 7]
    assert [call[2] for call in rig.next.calls if call[0] == "open"][-1] == Work.of(107 - 96, 96)
    assert not any(call[0] == "cancel" for call in rig.decode.calls)
    rig.decoded(8, 9, 10, 11)
    rig.from_next(8)
    assert rig.state is RequestState.REPEATING
    rig.from_next(9, 10, 11, 12)
    assert (rig.active.produced, rig.state) == ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], RequestState.DECODING)


async def test_log_probabilities_of_repeated_tokens_are_dropped_with_them(rig: MoveRig) -> None:
    def entries(*values: float) -> list[types_pb2.PositionLogprobs]:
        return [types_pb2.PositionLogprobs(logprob=value) for value in values]

    rig.decoded(3, logprobs=entries(-3))
    rig.active.take()
    rig.from_next(3, 4, logprobs=entries(-3, -4))
    delta = rig.active.take()
    assert delta is not None
    assert (delta.token_ids, [entry.logprob for entry in delta.logprobs]) == ((4,), [-4])


async def test_a_next_worker_that_differs_from_the_client_is_asked_anew() -> None:
    """In bf16 another batch may choose another token; what follows must follow from what the client has."""
    rig = MoveRig()
    await rig.begin()
    rig.decoded(3)
    rig.from_next(99)
    assert (rig.state, rig.next.reserved[-1]) == (RequestState.CLOSING_UP, [*PROMPT, 1, 2, 3])
    rig.decoded(4)
    rig.from_next(98)
    assert (rig.state, rig.next.reserved[-1]) == (RequestState.REPEATING, [*PROMPT, 1, 2, 3, 4])
    assert rig.has_left(rig.decode, OLD)
    assert rig.has_left(rig.next, "r#1.1.m2")
    rig.from_next(5)
    assert (rig.active.produced, rig.state) == ([1, 2, 3, 4, 5], RequestState.DECODING)
    rig.close()
    assert rig.next.calls[-1][:2] == ("cancel", "r#1.1.m3")


@pytest.mark.parametrize(
    "error", [WorkerDied("gone"), WorkerLost("gone"), Overloaded("full"), TransferFailed("t"), InvalidRequest("i")]
)
@pytest.mark.parametrize("closing_up", [False, True])
async def test_a_next_worker_that_fails_costs_nothing(error: Exception, closing_up: bool) -> None:
    rig = MoveRig()
    await rig.begin()
    if closing_up:
        rig.decoded(3, 4, 5, 6, 7)
        rig.from_next(3)
    produced = list(rig.active.produced)
    rig.fails(rig.next, error)
    assert (rig.state, rig.attempt.decode.name) == (RequestState.DECODING, "d0")
    rig.decoded(8, finish_reason=STOP)
    assert await rig.ended() is None
    assert rig.active.produced == [*produced, 8]
    assert (rig.active.num_failures, rig.active.record.num_failures) == (0, 0)
    assert rig.active.failed_workers == set()
    assert rig.outcomes == [MoveOutcome.STAYED]
    assert (("refused",) in rig.next.calls) == isinstance(error, Overloaded)


async def test_a_next_worker_that_is_gone_already_costs_nothing() -> None:
    rig = MoveRig()

    def refuse(*_: object) -> None:
        raise WorkerLost("d1 is not connected")

    rig.next.reserve = refuse  # type: ignore[method-assign]
    await rig.begin()
    assert (rig.state, rig.outcomes) == (RequestState.DECODING, [MoveOutcome.STAYED])
    assert rig.has_left(rig.next, "r#1.1.m1")
    rig.close()


@pytest.mark.parametrize("error", [WorkerDied("gone"), WorkerLost("gone"), TransferFailed("t")])
async def test_the_next_worker_carries_on_where_the_old_one_fails(error: Exception, rig: MoveRig) -> None:
    rig.decoded(3)
    rig.fails(rig.decode, error)
    assert (rig.state, rig.attempt.decode.name) == (RequestState.REPEATING, "d1")
    assert rig.active.num_failures == 1  # as a retry would be
    assert rig.active.failed_workers == {"d0"}
    rig.from_next(3)
    rig.from_next(4, finish_reason=STOP)
    assert await rig.ended() is None
    assert rig.active.produced == [1, 2, 3, 4]
    assert (rig.outcomes, rig.active.record.decode_worker) == ([MoveOutcome.CARRIED], "d1")


async def test_a_next_worker_far_behind_that_is_left_alone_is_asked_anew(rig: MoveRig) -> None:
    rig.decoded(3, 4, 5, 6, 7)
    rig.fails(rig.decode, WorkerLost("gone"))
    assert (rig.state, rig.next.reserved[-1]) == (RequestState.REPEATING, [*PROMPT, 1, 2, 3, 4, 5, 6, 7])
    assert rig.has_left(rig.next, "r#1.1.m1")
    rig.from_next(8)
    assert (rig.active.produced, rig.state) == ([1, 2, 3, 4, 5, 6, 7, 8], RequestState.DECODING)


async def test_where_both_fail_the_attempt_does_and_the_last_one_is_suspected(rig: MoveRig) -> None:
    rig.fails(rig.decode, WorkerLost("d0 is gone"))
    rig.fails(rig.next, WorkerLost("d1 is gone"))
    assert str(await rig.ended()) == "d1 is gone"
    assert rig.attempt.suspects == {"d1"}


async def test_workers_that_die_together_are_one_death(rig: MoveRig) -> None:
    rig.fails(rig.decode, WorkerDied("d0 is gone"))
    rig.fails(rig.next, WorkerDied("d1 is gone"))
    assert rig.attempt.died == "d1"
    rig.active.deaths.note("r", "d1", 2)  # as the dispatcher does: it is not quarantined
    assert isinstance(await rig.ended(), WorkerDied)


async def test_a_second_death_at_the_same_place_quarantines_a_moving_answer_too(rig: MoveRig) -> None:
    rig.active.deaths.note("r", "d7", 0)
    rig.active.deaths.all_known()
    rig.fails(rig.decode, WorkerDied("d0 is gone"))
    assert isinstance(await rig.ended(), Quarantined)
    assert ("cancel", "r#1.1.m1", {}) in rig.next.calls


async def test_an_error_of_the_answer_itself_ends_it_on_both(rig: MoveRig) -> None:
    rig.fails(rig.decode, NumericalFault("broken"))
    assert isinstance(await rig.ended(), NumericalFault)
    assert rig.has_left(rig.next, "r#1.1.m1")


async def test_an_answer_that_ends_during_the_move_ends_where_it_is(rig: MoveRig) -> None:
    rig.decoded(3, finish_reason=STOP)
    assert await rig.ended() is None
    assert rig.has_left(rig.next, "r#1.1.m1")
    assert (rig.active.produced, rig.outcomes) == ([1, 2, 3], [MoveOutcome.ENDED])


async def test_the_next_workers_end_is_the_answers_end(rig: MoveRig) -> None:
    rig.from_next(3, finish_reason=STOP)
    assert await rig.ended() is None
    assert rig.active.produced == [1, 2, 3]
    assert rig.has_left(rig.decode, OLD)


@pytest.mark.parametrize("phase", ["copying", "closing_up", "repeating", "moved"])
async def test_a_client_that_leaves_frees_exactly_those_who_hold_something(phase: str) -> None:
    rig = MoveRig()
    await rig.begin()
    rig.decoded(3, 4, 5, 6, 7)
    if phase != "copying":
        rig.from_next(3)
    if phase in ("repeating", "moved"):
        rig.decoded(8)
        rig.from_next(8)
    if phase == "moved":
        rig.from_next(9)
    num_before = len(rig.decode.calls), len(rig.next.calls)
    rig.close()
    ended = [
        {call[1] for call in link.calls[before:] if call[0] == "cancel"}
        for link, before in zip((rig.decode, rig.next), num_before, strict=True)
    ]
    name = "r#1.1.m1" if phase == "copying" else "r#1.1.m2"
    assert ended == [{OLD} if phase in ("copying", "closing_up") else set(), {name}]


async def test_log_probabilities_of_the_prompt_are_not_asked_for_again() -> None:
    rig = MoveRig(prompt_logprobs=1)
    await rig.submitted()
    rig.decoded(1, prompt_logprobs=[types_pb2.PositionLogprobs(logprob=-1)] * (len(PROMPT) - 1))
    rig.move()
    [first], [moved] = rig.decode.sent, rig.next.sent
    assert first.sampling.HasField("prompt_logprobs")
    assert not moved.sampling.HasField("prompt_logprobs")
    assert moved.salt == first.salt  # else the old worker's blocks would not be found
    rig.close()


async def test_an_answer_that_has_moved_can_move_on_and_back(rig: MoveRig) -> None:
    rig.from_next(3)
    rig.attempt.move(rig.decode, MoveCause.RESCUE, KVGroups(16))  # type: ignore[arg-type]
    assert rig.decode.sent[-1].request_id == "r#1.1.m2"
    rig.decoded(4)
    assert (rig.active.produced, rig.attempt.decode.name) == ([1, 2, 3, 4], "d0")
    assert rig.has_left(rig.next, "r#1.1.m1")
    assert rig.outcomes == [MoveOutcome.MOVED] * 2
