"""Each request is counted once, with what its client was told."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.router.dispatch.record import FINISHED, RequestRecord
from services.router.dispatch.request import FinishReason, FoundAnswer, Request, Resume, TokenDelta
from services.router.edge.output_stream import OutputStream
from services.router.edge.request_ledger import CallEntry
from services.router.views.timings import delivered_at, first_token_at, tpot_s
from shared.engine.sampling_params import BeamSearch, SamplingParams
from shared.errors import InvalidRequest, NumericalFault, Overloaded
from shared.model.text.tokenizer import Tokenizer
from tests.unit.router.edge.scripted_core import ScriptedCore, ScriptedRequest, text_steps

PROMPT = (1, 2, 3)


class Counted:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)

    @property
    def outcomes(self) -> list[tuple[str, FinishReason | None, int]]:
        return [(record.outcome, record.reason, record.num_given_tokens) for record in self.records]


def requests(*samplings: SamplingParams) -> list[Request]:
    return [Request(f"r-{i}", PROMPT, sampling) for i, sampling in enumerate(samplings)]


async def test_an_answer_is_counted_with_its_end_and_the_tokens_that_were_given(tokenizer: Tokenizer) -> None:
    counted, core = Counted(), ScriptedCore(lambda request: text_steps(tokenizer, "hello"))
    async with OutputStream(core, requests(SamplingParams()), tokenizer, counted) as stream:
        async for _ in stream:
            pass
    assert counted.outcomes == [(FINISHED, FinishReason.LENGTH, 5)]


async def test_a_stop_string_is_a_finish_and_no_cancel(tokenizer: Tokenizer) -> None:
    counted, core = Counted(), ScriptedCore(lambda request: text_steps(tokenizer, "say STOP and more"))
    async with OutputStream(core, requests(SamplingParams(stop=("STOP",))), tokenizer, counted) as stream:
        async for _ in stream:
            pass
    assert counted.outcomes == [(FINISHED, FinishReason.STOP, len("say STOP"))]


async def test_what_its_reader_leaves_is_cancelled_with_the_tokens_so_far(tokenizer: Tokenizer) -> None:
    waiting = asyncio.Event()
    core = ScriptedCore(lambda request: [*text_steps(tokenizer, "hello")[:3], waiting])
    counted = Counted()
    async with OutputStream(core, requests(SamplingParams()), tokenizer, counted) as stream:
        await anext(stream)
        await anext(stream)
    assert counted.outcomes == [("cancelled", None, 2)]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_beam_search_is_counted_with_the_tokens_of_all_beams(tokenizer: Tokenizer, is_whole: bool) -> None:
    found = FoundAnswer((65, 66, 67, 68), FinishReason.LENGTH, -1.0, -4.0)
    end = TokenDelta((), (), FinishReason.LENGTH, (), (found, found))

    class Searching(ScriptedCore):
        def submit(self, request: Request, record: RequestRecord) -> ScriptedRequest:
            record.num_output_tokens = 5 if is_whole else 2  # with one of an attempt that failed
            return super().submit(request, record)

    counted, core = Counted(), Searching(lambda request: [end if is_whole else asyncio.Event()])
    search = SamplingParams(max_tokens=4, beams=BeamSearch(3, 2))
    async with OutputStream(core, requests(search), tokenizer, counted) as stream:
        if is_whole:
            assert [len(delta.beams) async for _, delta in stream] == [2]
        assert stream.num_output_tokens == (12 if is_whole else 6)
    assert counted.outcomes == [(FINISHED, FinishReason.LENGTH, 12) if is_whole else ("cancelled", None, 6)]
    [record] = counted.records
    took_s = delivered_at(record) - first_token_at(record)
    assert tpot_s(record) == (pytest.approx(took_s / 4) if is_whole else None), "beams advance together"


async def test_a_failure_ends_each_answer_that_has_not_finished(tokenizer: Tokenizer) -> None:
    waiting = asyncio.Event()
    scripts = {
        "r-0": text_steps(tokenizer, "a"),
        "r-1": [waiting, NumericalFault("broken")],
        "r-2": [*text_steps(tokenizer, "bcd")[:2], asyncio.Event()],
    }
    counted, core = Counted(), ScriptedCore(lambda request: scripts[request.request_id])
    three = requests(SamplingParams(), SamplingParams(), SamplingParams())

    async def read() -> None:
        async with OutputStream(core, three, tokenizer, counted) as stream:
            async for index, _ in stream:
                if index == 2:
                    waiting.set()

    with pytest.raises(NumericalFault):
        await read()
    found = {record.ask.request_id: record.outcome for record in counted.records}
    assert found == {"r-0": FINISHED, "r-1": "numerical_fault", "r-2": "numerical_fault"}
    assert len(counted.records) == 3


async def test_a_refused_answer_takes_the_others_of_its_call_with_it(tokenizer: Tokenizer) -> None:
    def script(request: Request):
        if request.request_id == "r-1":
            raise Overloaded("full")
        return text_steps(tokenizer, "hello")

    counted = Counted()
    with pytest.raises(Overloaded):
        async with OutputStream(ScriptedCore(script), requests(SamplingParams(), SamplingParams()), tokenizer, counted):
            pass
    assert counted.outcomes == [("overloaded", None, 0)] * 2


async def test_an_answer_is_delivered_where_its_reader_comes_back_and_not_before(tokenizer: Tokenizer) -> None:
    scripts = {"r-0": text_steps(tokenizer, "a"), "r-1": [*text_steps(tokenizer, "bc")[:1], asyncio.Event()]}
    counted, core = Counted(), ScriptedCore(lambda request: scripts[request.request_id])
    async with OutputStream(core, requests(SamplingParams(), SamplingParams()), tokenizer, counted) as stream:
        index, delta = await anext(stream)
        assert (index, delta.finish is None, counted.records) == (0, False, [])
        began = time.perf_counter()
        await anext(stream)
        [record] = counted.records
        assert (record.ask.request_id, record.outcome) == ("r-0", FINISHED)
        assert began <= record.delivered_at <= time.perf_counter()
    assert [record.outcome for record in counted.records] == [FINISHED, "cancelled"]


async def test_an_answer_that_the_client_has_already_is_finished(tokenizer: Tokenizer) -> None:
    had = Request("r", PROMPT, SamplingParams(), resume=Resume((65,), 1, FinishReason.STOP))
    counted = Counted()
    async with OutputStream(ScriptedCore(lambda request: []), [had], tokenizer, counted) as stream:
        assert [delta async for delta in stream] == []
    assert counted.outcomes == [(FINISHED, FinishReason.STOP, 0)]


def test_a_call_that_ends_before_its_answers_is_one_request() -> None:
    counted = Counted()
    with pytest.raises(InvalidRequest), CallEntry(counted, 0.0):
        raise InvalidRequest("bad")
    with pytest.raises(asyncio.CancelledError), CallEntry(counted, 0.0):
        raise asyncio.CancelledError
    with pytest.raises(ZeroDivisionError), CallEntry(counted, 0.0):
        raise ZeroDivisionError
    with CallEntry(counted, 0.0) as entry:
        entry.answers_begin()
    assert [record.outcome for record in counted.records] == ["invalid_value", "cancelled", "internal_error"]
