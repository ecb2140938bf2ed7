"""One request's output as text, whatever the core's deltas look like."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from services.router.dispatch.record import RequestRecord
from services.router.dispatch.request import FinishReason, Request, TextOptions, TokenDelta, TokenLogprobs
from services.router.edge.output_stream import OutputDelta, OutputStream
from shared.engine.sampling_params import SamplingParams
from shared.errors import Cancelled, Internal
from shared.model.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.unit.router.edge.scripted_core import ScriptedCore, ScriptedRequest, Step, text_steps

PROMPT = (1, 2, 3)
Outputs = AsyncGenerator[OutputDelta, None]


def started(
    tokenizer: Tokenizer, steps: Sequence[Step], sampling: SamplingParams | None = None
) -> tuple[Outputs, ScriptedRequest]:
    request = Request("r", PROMPT, sampling or SamplingParams())
    return submitted(tokenizer, ScriptedRequest(request, steps))


def submitted(tokenizer: Tokenizer, running: ScriptedRequest) -> tuple[Outputs, ScriptedRequest]:
    """The deltas of the one answer that `running` gives; it is submitted when the first is asked for."""
    core = ScriptedCore(lambda request: ())

    def submit(request: Request, record: RequestRecord) -> ScriptedRequest:
        running.record = record
        return running

    core.submit = submit  # type: ignore[method-assign]

    async def deltas() -> Outputs:
        async with OutputStream(core, [running.request], tokenizer) as stream:
            async for index, delta in stream:
                assert index == 0
                yield delta

    return deltas(), running


async def read(outputs: Outputs) -> list[OutputDelta]:
    async with contextlib.aclosing(outputs):
        return [delta async for delta in outputs]


def joined(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_text_tokens_and_the_finish_come_out_in_order(tokenizer: Tokenizer) -> None:
    outputs, running = started(tokenizer, text_steps(tokenizer, "hello"))
    deltas = await read(outputs)
    assert [delta.text for delta in deltas] == list("hello")
    assert [d.finish is None for d in deltas] == [True] * 4 + [False]
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == (FinishReason.LENGTH, None)
    assert (finish.usage.num_prompt_tokens, finish.usage.num_output_tokens) == (3, 5)
    assert finish.usage.num_cached_tokens == 1
    assert finish.record.decode_worker == "d0"
    assert running.closed.is_set()


async def test_a_character_of_several_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    outputs, _ = started(tokenizer, text_steps(tokenizer, "a🎉b"))
    assert [delta.text for delta in await read(outputs)] == ["a", "", "", "", "🎉", "b"]


async def test_a_character_cut_by_max_tokens_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    steps = text_steps(tokenizer, "a🎉")[:2]
    assert isinstance(steps[1], TokenDelta)
    steps[1] = TokenDelta(steps[1].token_ids, (), FinishReason.LENGTH)
    outputs, _ = started(tokenizer, steps)
    assert joined(await read(outputs)) == "a\ufffd"


async def test_the_end_token_counts_but_is_no_text(tokenizer: Tokenizer) -> None:
    outputs, _ = started(
        tokenizer,
        [TokenDelta((65, 66, 67), (), FinishReason.STOP)],
        SamplingParams(stop_token_ids=(67,)),
    )
    (delta,) = await read(outputs)
    assert delta.text == tokenizer.decode([65, 66])
    assert delta.token_ids == (65, 66, 67)
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_reason) == (FinishReason.STOP, 67)
    assert delta.finish.usage.num_output_tokens == 3


async def test_a_stop_string_cuts_text_tokens_and_logprobs_and_ends_the_request_at_once(
    tokenizer: Tokenizer,
) -> None:
    ids = tuple(tokenizer.encode("ab##cd", add_special_tokens=False))
    entries = tuple(TokenLogprobs(-float(i), ()) for i in range(6))
    never = asyncio.Event()
    outputs, running = started(tokenizer, [TokenDelta(ids, entries), never], SamplingParams(stop=("##",), logprobs=0))
    delta = await anext(outputs)
    assert running.closed.is_set()  # before anyone reads on
    assert (delta.text, delta.token_ids, delta.logprobs) == ("ab", ids[:4], entries[:4])
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_reason) == (FinishReason.STOP, "##")
    assert delta.finish.usage.num_output_tokens == 4
    assert [delta async for delta in outputs] == []


async def test_held_back_text_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    outputs, _ = started(tokenizer, text_steps(tokenizer, "ab#", FinishReason.STOP), SamplingParams(stop=("##",)))
    deltas = await read(outputs)
    assert [delta.text for delta in deltas] == ["a", "b", "", "#"]
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.stop_reason is None


async def test_a_stop_string_may_end_in_a_flushed_broken_character(tokenizer: Tokenizer) -> None:
    steps = text_steps(tokenizer, "é")[:1]
    assert isinstance(steps[0], TokenDelta)
    last = TokenDelta(steps[0].token_ids, (), FinishReason.LENGTH)
    outputs, _ = started(tokenizer, [last], SamplingParams(stop=("\ufffd",)))
    (delta,) = await read(outputs)
    assert delta.text == ""
    assert delta.finish is not None
    assert delta.finish.stop_reason == "\ufffd"


async def test_no_stop_string_ends_an_answer_before_min_tokens(tokenizer: Tokenizer) -> None:
    outputs, _ = started(tokenizer, text_steps(tokenizer, "a.b.c.d"), SamplingParams(stop=(".",), min_tokens=4))
    deltas = await read(outputs)
    assert joined(deltas) == "a.b"
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.usage.num_output_tokens == 4


@given(
    st.text(alphabet="ab é", max_size=16),
    st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=20),
    st.integers(0, 6),
)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_grouping_of_tokens_into_deltas_changes_nothing(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], min_tokens: int
) -> None:
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id or 0]
    sampling = SamplingParams(stop=tuple(stops), min_tokens=min_tokens)

    async def outcome(sizes: list[int]) -> tuple[str, list[int], object, int]:
        steps: list[Step] = []
        at = 0
        for size in [*sizes, len(ids)]:
            if at < len(ids):
                end = min(at + size, len(ids))
                reason = FinishReason.STOP if end == len(ids) else None
                steps.append(TokenDelta(tuple(ids[at:end]), (), reason))
                at = end
        outputs, _ = started(tokenizer, steps, sampling)
        deltas = await read(outputs)
        finish = deltas[-1].finish
        assert finish is not None
        tokens = [token for delta in deltas for token in delta.token_ids]
        return joined(deltas), tokens, finish.stop_reason, finish.usage.num_output_tokens

    one_by_one = asyncio.run(outcome([1] * len(ids)))
    assert asyncio.run(outcome(sizes)) == one_by_one
    assert one_by_one[3] == len(one_by_one[1])


async def test_a_core_that_ends_without_a_reason_is_an_error(tokenizer: Tokenizer) -> None:
    outputs, running = started(tokenizer, text_steps(tokenizer, "ab")[:1])
    await anext(outputs)
    with pytest.raises(Internal, match="without a finish reason"):
        await anext(outputs)
    assert running.closed.is_set()


async def test_a_request_cancelled_in_the_cluster_is_an_error(tokenizer: Tokenizer) -> None:
    outputs, running = started(tokenizer, [TokenDelta((), (), FinishReason.CANCELLED)])
    with pytest.raises(Cancelled):
        await anext(outputs)
    assert running.closed.is_set()


async def test_something_cancelled_in_the_core_is_a_failure_and_not_a_silent_end(tokenizer: Tokenizer) -> None:
    class Abandoned(ScriptedRequest):
        def notify(self, reader: asyncio.Future[None]) -> None:
            reader.cancel()

    outputs, running = submitted(tokenizer, Abandoned(Request("r", PROMPT, SamplingParams()), []))
    with pytest.raises(Internal, match="abandoned"):
        await anext(outputs)
    assert running.closed.is_set()


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab##")])
async def test_the_stop_string_is_left_out_unless_it_is_asked_for(
    tokenizer: Tokenizer, include: bool, text: str
) -> None:
    request = Request("r", PROMPT, SamplingParams(stop=("##",)), text=TextOptions(include_stop=include))
    outputs, _ = submitted(tokenizer, ScriptedRequest(request, text_steps(tokenizer, "ab##cd")))
    assert joined(await read(outputs)) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (TextOptions(), "ab"),
        (TextOptions(skip_special_tokens=False), "a<|bos|>b"),
        (TextOptions(kept_special=frozenset({"<|bos|>", "<|other|>"})), "a<|bos|>b"),
        (TextOptions(kept_special=frozenset({"<|eos|>"})), "ab"),
    ],
)
async def test_special_tokens_are_no_text_unless_they_are_asked_for_or_mark_something(
    tokenizer: Tokenizer, options: TextOptions, text: str
) -> None:
    request = Request("r", PROMPT, SamplingParams(), text=options)
    outputs, _ = submitted(tokenizer, ScriptedRequest(request, text_steps(tokenizer, "a<|bos|>b")))
    assert joined(await read(outputs)) == text
