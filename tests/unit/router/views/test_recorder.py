"""Recordings: what an id stands for, whose requests are taken, and what is kept of them."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.dispatch.record import RequestEvent, RequestRecord, RequestState
from services.router.dispatch.request import Request, Resume
from services.router.views import recorder as module
from services.router.views.recorder import ID_BITS, Recorder, Recording, block_ids
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, Overloaded

KEY = bytes(range(32))
SIZE = 16
TOKENS = st.lists(st.integers(0, 3), max_size=4 * SIZE)


def request(*token_ids: int, **fields: object) -> Request:
    sampling = SamplingParams(seed=1, max_tokens=9)
    return Request("r", tuple(token_ids), sampling, arrived_at=2.0, **fields)  # type: ignore[arg-type]


def finish(record: RequestRecord, event: RequestEvent, state: RequestState, num_tokens: int = 3) -> RequestRecord:
    record.add(RequestEvent.FIRST_TOKEN, RequestState.SHIPPING, at=2.5)
    record.num_output_tokens = num_tokens
    record.add(event, state, at=3.5)
    return record


@given(TOKENS, TOKENS)
def test_ids_are_equal_up_to_the_block_in_which_two_prompts_differ(one: list[int], other: list[int]) -> None:
    ids = [block_ids(KEY, "t", array("I", tokens), SIZE) for tokens in (one, other)]
    assert [len(found) for found in ids] == [-(-len(one) // SIZE), -(-len(other) // SIZE)]
    for index, (left, right) in enumerate(zip(*ids, strict=False)):
        assert (left == right) == (one[: (index + 1) * SIZE] == other[: (index + 1) * SIZE])
    assert all(0 <= number < 1 << ID_BITS for found in ids for number in found)


def test_under_another_key_or_for_those_that_share_nothing_every_id_is_another_one() -> None:
    tokens = array("I", range(64))
    found = [
        block_ids(KEY, "t", tokens, SIZE),
        block_ids(bytes(32), "t", tokens, SIZE),
        block_ids(KEY, "u", tokens, SIZE),
    ]
    assert len({number for ids in found for number in ids}) == 12


async def test_it_takes_what_arrives_while_it_is_open_and_is_over_when_that_has_ended() -> None:
    recorder = Recorder()
    before, within, late = (request(*range(20), salt=name) for name in ("a", "b", "c"))
    records = [each.new_record() for each in (before, within, late)]
    recorder.began(before, records[0])
    recording = recorder.open(KEY, SIZE)
    recorder.began(within, records[1])
    recording.stop()
    recorder.began(late, records[2])
    assert (recording.num_running, recording.is_over) == (1, False)
    for record in records:
        recorder.ended(finish(record, RequestEvent.FINISH, RequestState.FINISHED))
    await asyncio.wait_for(recording.wait(), 60)
    (one,) = recording.take(10, 10)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.max_tokens, one.outcome) == (20, 3, 9, "finished")
    assert (one.ttft_s, one.tpot_s) == (0.5, 0.5)
    assert one.block_ids == block_ids(KEY, "1/b/", array("I", range(20)), SIZE)
    assert recording.is_over


def test_what_was_produced_on_an_earlier_call_is_a_part_of_the_prompt() -> None:
    recorder = Recorder()
    recording = recorder.open(KEY, SIZE)
    resumed = request(1, 2, resume=Resume((3, 4, 5)))
    recorder.began(resumed, record := resumed.new_record())
    recorder.ended(finish(record, RequestEvent.FINISH, RequestState.FINISHED))
    (one,) = recording.take(1, 1)
    assert one.num_prompt_tokens == 5


def test_ended_requests_that_nobody_reads_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    monkeypatch.setattr(module, "MAX_WAITING_IDS", 5)
    recorder = Recorder()
    recording = recorder.open(KEY, SIZE)
    for num_tokens in (16, 32, 64, 16, 16):  # 1 and 2 ids; 4 are too many; a third request, and a fourth
        asked = request(*range(num_tokens))
        recorder.began(asked, record := asked.new_record())
        recorder.ended(finish(record, RequestEvent.CANCEL, RequestState.CANCELLED))
    assert (recording.num_dropped, recording.num_running) == (2, 0)
    assert [one.num_prompt_tokens for one in recording.take(2, 100)] == [16, 32]
    assert [one.outcome for one in recording.take(2, 100)] == ["cut"]
    recording.stop()
    assert recording.is_over


def test_a_closed_recording_takes_nothing_and_there_are_only_so_many() -> None:
    recorder = Recorder()
    open_ = [recorder.open(KEY, SIZE) for _ in range(module.MAX_RECORDINGS)]
    with pytest.raises(Overloaded, match=f"{module.MAX_RECORDINGS}"):
        recorder.open(KEY, SIZE)
    recorder.close(open_[0])
    recorder.close(open_[0])
    asked = request(1)
    recorder.began(asked, asked.new_record())
    assert [one.num_running for one in open_] == [0, *([1] * (module.MAX_RECORDINGS - 1))]
    recorder.open(KEY, SIZE)


@pytest.mark.parametrize(
    ("key", "size", "field"),
    [(b"x" * 15, 16, "key"), (b"x" * 65, 16, "key"), (KEY, 0, "block_size"), (KEY, 24, "block_size"),
     (KEY, 1 << 17, "block_size")],
)  # fmt: skip
def test_bad_arguments_name_the_field_and_the_limit(key: bytes, size: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Recording(key, size)
    assert refused.value.field == field
    assert refused.value.details["limit"]
