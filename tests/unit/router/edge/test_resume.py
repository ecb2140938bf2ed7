"""An answer that continues behind any cut is the answer that was not cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from services.router.dispatch.request import FinishReason, Request, Resume
from services.router.edge.input_processor import CallInfo, InputProcessor
from services.router.edge.output_stream import INLINE_TOKENS, OutputDelta, OutputStream
from services.router.edge.text.prompt_tokenizer import TokensPrompt
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer
from shared.seeds import SAMPLER_VERSION
from tests.unit.router.edge.scripted_core import ScriptedCore, Step, make_input_processor, text_steps

PROMPT = (1, 2, 3)


async def read(tokenizer: Tokenizer, steps: Sequence[Step], sampling: SamplingParams, resume: Resume | None = None):
    """All deltas of an answer whose worker says `steps`; those that the client has are not said again."""
    core = ScriptedCore(lambda request: steps[len(request.resumed_token_ids) :])
    async with OutputStream(core, [Request("r", PROMPT, sampling, resume=resume)], tokenizer) as stream:
        return [delta async for _, delta in stream]


def text(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("answer", "sampling"),
    [
        ("hello", {}),
        ("a🎉bé", {}),
        ("one STOP two", {"stop": ("STOP",)}),
        ("aab aaab", {"stop": ("aaab", "xx")}),
        ("ababab", {"stop": ("ab",), "min_tokens": 3}),
        ("held back ST", {"stop": ("STOP",)}),
        ("🎉!", {"stop": ("🎉!",)}),
        ("p q", {"logprobs": 2}),
    ],
)
async def test_every_cut_gives_the_same_answer(tokenizer: Tokenizer, answer: str, sampling: dict) -> None:
    params = SamplingParams(seed=1, max_tokens=50, **sampling)
    steps = text_steps(tokenizer, answer, FinishReason.STOP, logprobs=params.logprobs)
    whole = await read(tokenizer, steps, params)
    for cut in range(len(whole)):
        had = whole[:cut]
        token_ids = tuple(token for delta in had for token in delta.token_ids)
        for num_chars in (len(text(had)), None):
            rest = await read(tokenizer, steps, params, Resume(token_ids, num_chars))
            assert text(had) + text(rest) == text(whole)
            assert [t for d in (*had, *rest) for t in d.token_ids] == [t for d in whole for t in d.token_ids]
            assert [e for d in (*had, *rest) for e in d.logprobs] == [e for d in whole for e in d.logprobs]
            assert rest[-1].finish == whole[-1].finish  # usage counts the whole


async def test_text_that_never_arrived_is_sent_and_text_that_did_is_not_repeated(tokenizer: Tokenizer) -> None:
    steps, params = text_steps(tokenizer, "abcdef"), SamplingParams(seed=1, max_tokens=50)
    token_ids = tuple(token for step in steps[:4] for token in step.token_ids)
    assert text(await read(tokenizer, steps, params, Resume(token_ids, 1))) == "bcdef"
    assert text(await read(tokenizer, steps, params, Resume(token_ids, 4))) == "ef"


async def test_a_choice_that_the_client_has_as_a_whole_is_not_run_again(tokenizer: Tokenizer) -> None:
    core = ScriptedCore(lambda request: text_steps(tokenizer, "x"))
    params = SamplingParams(seed=1, max_tokens=50)
    had = Request("r-0", PROMPT, params, resume=Resume((4, 5), None, FinishReason.STOP))
    async with OutputStream(core, [had, Request("r-1", PROMPT, params)], tokenizer) as stream:
        assert {index async for index, _ in stream} == {1}
    assert [request.request_id for request in core.requests] == ["r-1"]


async def prepared(processor: InputProcessor, **sampling) -> Request:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return await processor.prepare(TokensPrompt(list(PROMPT)), params, CallInfo())


@pytest.mark.parametrize(
    ("field", "resume", "sampling"),
    [
        ("resume.token_ids", Resume((4,) * 8), {}),
        ("resume.token_ids", Resume((10**6,)), {}),
        ("resume.num_chars", Resume((4, 5), 3), {}),
        ("seed", Resume((4,)), {"temperature": 1.0}),
    ],
)
async def test_a_state_that_cannot_be_names_its_field(tokenizer: Tokenizer, field, resume, sampling) -> None:
    processor = make_input_processor(ScriptedCore(lambda request: ()), tokenizer)
    request = await prepared(processor, **sampling)
    with pytest.raises(InvalidRequest) as caught:
        await processor.resumed(request, resume, None)
    assert caught.value.field == field


@pytest.mark.parametrize("version", [0, 1, SAMPLER_VERSION + 1])
async def test_a_sampled_answer_of_another_sampler_is_refused_by_name(tokenizer: Tokenizer, version: int) -> None:
    processor = make_input_processor(ScriptedCore(lambda request: ()), tokenizer)
    request = await prepared(processor, temperature=1.0)
    with pytest.raises(InvalidRequest, match=f"is {version or 1}, that of .* is {SAMPLER_VERSION}") as caught:
        await processor.resumed(request, Resume((4,), sampler_version=version), 99)
    assert caught.value.field == "resume.sampler_version"
    await processor.resumed(request, Resume((), sampler_version=version), 99)  # nothing of it is there yet
    greedy = await prepared(processor, temperature=0.0)
    await processor.resumed(greedy, Resume((4,), sampler_version=version), None)


async def test_tokens_behind_a_stop_string_are_refused(tokenizer: Tokenizer) -> None:
    processor = make_input_processor(ScriptedCore(lambda request: ()), tokenizer)
    request = await prepared(processor, stop=("b",))
    token_ids = tuple(tokenizer.encode("abc", add_special_tokens=False))
    with pytest.raises(InvalidRequest, match="'b' is complete at token 2") as caught:
        await processor.resumed(request, Resume(token_ids), None)
    assert caught.value.field == "resume.token_ids"


async def test_the_seed_of_the_answer_replaces_the_drawn_one(tokenizer: Tokenizer) -> None:
    processor = make_input_processor(ScriptedCore(lambda request: ()), tokenizer)
    request = await prepared(processor, temperature=1.0)
    assert request.sampling.seed is not None
    assert request.sampling.seed < 2**53
    assert (await processor.resumed(request, Resume((4,), sampler_version=SAMPLER_VERSION), 99)).sampling.seed == 99


async def test_a_long_resumed_answer_lets_the_loop_serve_others(tokenizer: Tokenizer) -> None:
    core = ScriptedCore(lambda request: ())
    core.limit = 8 * INLINE_TOKENS
    processor = make_input_processor(core, tokenizer)
    request = await prepared(processor, max_tokens=4 * INLINE_TOKENS, stop=("b",))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    (b,) = tokenizer.encode("b", add_special_tokens=False)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    had = Resume((a,) * (2 * INLINE_TOKENS))
    before = turns
    assert (await processor.resumed(request, had, None)).resume == had
    assert turns > before
    with pytest.raises(InvalidRequest, match=f"'b' is complete at token {2 * INLINE_TOKENS}"):
        await processor.resumed(request, Resume((*had.token_ids[1:], b)), None)
    counting.cancel()
