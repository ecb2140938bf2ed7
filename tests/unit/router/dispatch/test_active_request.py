"""What a client's side reads of a request, however slowly it reads."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.record import Failure, RequestEvent, RequestRecord, RequestState
from services.router.dispatch.request import FinishReason, Request
from services.router.placement.lengths import AnswerLife, Lengths
from shared.engine.sampling_params import SamplingParams
from shared.errors import Internal, WorkerLost
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.unit.router.reading import deltas


def tokens(*token_ids: int, finish: types_pb2.FinishReason.ValueType = 0) -> types_pb2.SequenceTokens:
    logprobs = [types_pb2.PositionLogprobs(logprob=-float(token_id)) for token_id in token_ids]
    return types_pb2.SequenceTokens(request_id="r#1.1", token_ids=token_ids, logprobs=logprobs, finish_reason=finish)


@pytest.fixture
async def active() -> ActiveRequest:
    made = ActiveRequest(Request("r", (1, 2), SamplingParams(seed=1, max_tokens=8)), WriteCoalescer())
    for event in (RequestEvent.PLACED, RequestEvent.SUBMITTED, RequestEvent.JOINED):
        made.move(event)
    return made


async def test_tokens_that_waited_come_as_one_delta_in_order(active: ActiveRequest) -> None:
    active.emit(tokens(5))
    active.emit(tokens(6, 7))
    active.emit(tokens(8, finish=types_pb2.FINISH_REASON_LENGTH))
    active.settle()
    [delta] = [delta async for delta in deltas(active)]
    assert (delta.token_ids, delta.finish_reason) == ((5, 6, 7, 8), FinishReason.LENGTH)
    assert [entry.logprob for entry in delta.logprobs] == [-5.0, -6.0, -7.0, -8.0]


async def test_what_an_answer_tells_of_lengths_is_its_tokens_so_far_and_its_end() -> None:
    lengths, expected = Lengths(), Lengths()
    request = Request("r", (1, 2), SamplingParams(seed=1, max_tokens=8))
    answers = [ActiveRequest(request, WriteCoalescer(), life=AnswerLife(lengths)) for _ in range(3)]
    lives = [AnswerLife(expected) for _ in range(3)]
    for active, life in zip(answers, lives, strict=True):
        for event in (RequestEvent.PLACED, RequestEvent.SUBMITTED, RequestEvent.JOINED):
            active.move(event)
        active.emit(tokens(5))
        active.emit(tokens(6, 7))
        life.at(3)
        assert lengths.mean == expected.mean
    answers[0].emit(tokens(8, finish=types_pb2.FINISH_REASON_LENGTH))
    for active in answers[:2]:  # the second is cancelled, the third runs
        active.count_length()
        active.count_length()
    lives[0].ended(4)
    lives[1].left()
    assert lengths.mean == expected.mean
    for num_tokens in range(6):
        assert lengths.share_longer(num_tokens) == expected.share_longer(num_tokens)


async def test_an_error_comes_behind_the_tokens_before_it(active: ActiveRequest) -> None:
    active.emit(tokens(5))
    active.fail(WorkerLost("gone"))
    source = deltas(active)
    assert (await anext(source)).token_ids == (5,)
    with pytest.raises(WorkerLost, match="gone"):
        await anext(source)


async def test_the_last_tokens_wait_until_the_request_is_settled(active: ActiveRequest) -> None:
    active.emit(tokens(5))
    source = deltas(active)
    assert (await anext(source)).token_ids == (5,)
    last = asyncio.ensure_future(anext(source))
    active.emit(tokens(6, finish=types_pb2.FINISH_REASON_LENGTH))
    for _ in range(5):
        await asyncio.sleep(0)
        assert not last.done()
    active.settle()
    async with asyncio.timeout(60):
        assert (await last).token_ids == (6,)


async def test_a_request_that_is_given_up_ends_its_reader(active: ActiveRequest) -> None:
    reading = asyncio.ensure_future(anext(deltas(active), None))
    await asyncio.sleep(0)
    active.settle()
    async with asyncio.timeout(60):
        assert await reading is None


async def test_the_end_may_come_while_the_delta_before_it_is_passed_on(active: ActiveRequest) -> None:
    active.emit(tokens(5))
    read = []
    async for delta in deltas(active):
        read.append(delta.token_ids)
        if len(read) == 1:
            active.emit(tokens(6, finish=types_pb2.FINISH_REASON_STOP))
            active.settle()
    assert read == [(5,), (6,)]


async def test_an_end_that_overtakes_its_woken_reader_waits_too(active: ActiveRequest) -> None:
    reading = asyncio.ensure_future(anext(deltas(active)))
    await asyncio.sleep(0)  # it waits now
    active.emit(tokens(5))
    asyncio.get_running_loop().call_soon(active.emit, tokens(6, finish=types_pb2.FINISH_REASON_LENGTH))
    for _ in range(5):
        await asyncio.sleep(0)
        assert not reading.done()
    active.settle()
    async with asyncio.timeout(60):
        assert (await reading).token_ids == (5, 6)


async def test_the_record_follows_the_request(active: ActiveRequest) -> None:
    first = types_pb2.SequenceTokens(
        prefix_fetch_ms=100, adapter_ms=50, prefill_queue_ms=200, prefill_compute_ms=300,
        num_cached_tokens=9, num_fetched_tokens=7, num_peer_tokens=5,
    )  # fmt: skip
    active.on_first_token(first)
    record = active.record
    assert record.adapter_ms == 50
    assert (record.prefix_fetch_ms, record.prefill_queue_ms, record.prefill_compute_ms) == (100, 200, 300)
    assert (record.num_cached_tokens, record.num_fetched_tokens, record.num_peer_tokens) == (2, 7, 5)  # of 2 at most
    active.emit(tokens(5, 6))
    active.move(RequestEvent.RETRY, "d0", WorkerLost("gone"))
    assert record.num_output_tokens == active.num_output_tokens == 2
    assert [entry.event.value for entry in record.entries] == ["accepted", "placed", "submitted", "joined", "retry"]
    last = record.entries[-1]
    assert (last.worker, last.state, last.error) == ("d0", RequestState.QUEUED, Failure("worker_lost", "gone", 503))
    assert all(before.at <= after.at for before, after in itertools.pairwise(record.entries))


async def test_who_follows_the_record_sees_each_entry_once() -> None:
    seen: list[RequestEvent] = []

    class Following:
        def noted(self, record: RequestRecord) -> None:
            seen.append(record.entries[-1].event)

    request = Request("r", (1, 2), SamplingParams(seed=1, max_tokens=8))
    made = ActiveRequest(request, WriteCoalescer(), observer=Following())
    made.note(RequestEvent.MATCHED)
    made.move(RequestEvent.CANCEL)
    assert seen == [RequestEvent.ACCEPTED, RequestEvent.MATCHED, RequestEvent.CANCEL]
    with pytest.raises(Internal):
        made.move(RequestEvent.PLACED)
    assert len(seen) == len(made.record.entries) == 3


async def test_the_first_tokens_are_written_at_once_and_later_ones_may_wait_for_each_other() -> None:
    class Noting(WriteCoalescer):
        def take(self, reader: asyncio.Future[None], *, now: bool = False) -> None:
            at_once.append(now)
            super().take(reader, now=now)

    at_once: list[bool] = []
    made = ActiveRequest(Request("r", (1, 2), SamplingParams(seed=1, max_tokens=8)), Noting())
    for event in (RequestEvent.PLACED, RequestEvent.SUBMITTED, RequestEvent.JOINED):
        made.move(event)
    source = deltas(made)
    async with asyncio.timeout(60):
        for token_id in (5, 6, 7):
            reading = asyncio.ensure_future(anext(source))
            await asyncio.sleep(0)
            made.emit(tokens(token_id))
            await reading
    assert at_once == [True, False, False]
