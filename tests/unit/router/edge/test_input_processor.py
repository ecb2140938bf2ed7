"""What the input_processor lets into the core, and with which settings filled in."""

from __future__ import annotations

import time

import pytest

from services.router.edge.input_processor import CallInfo, InputProcessor, PromptOptions, checked_request_id
from services.router.edge.settings import EdgeSettings
from services.router.edge.text.prompt_tokenizer import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, NotFound, PromptTooLong, WorkerLost
from shared.model.text.tokenizer import Tokenizer
from tests.unit.router.edge.scripted_core import ScriptedCore, make_input_processor


def _begin(tokenizer: Tokenizer) -> int:
    """Id of the token that begins a prompt."""
    [token] = tokenizer.encode(tokenizer.special_tokens["bos_token"], add_special_tokens=False)
    return token


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore(lambda request: [])


@pytest.fixture
def input_processor(core: ScriptedCore, tokenizer: Tokenizer) -> InputProcessor:
    return make_input_processor(core, tokenizer)


async def test_text_gets_special_tokens_a_drawn_seed_an_id_and_the_room_left(
    input_processor: InputProcessor, tokenizer: Tokenizer
) -> None:
    before = time.perf_counter()
    first = await input_processor.prepare(TextPrompt("hi"), SamplingParams(), CallInfo())
    second = await input_processor.prepare(TextPrompt("hi"), SamplingParams(), CallInfo())
    assert first.prompt_token_ids == tuple(tokenizer.encode("hi"))
    assert first.prompt_token_ids[0] == _begin(tokenizer)
    assert first.sampling.max_tokens == 100 - 3
    assert first.sampling.seed is not None
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id
    assert before <= first.arrived_at <= time.perf_counter()


async def test_token_ids_are_taken_as_they_are(input_processor: InputProcessor) -> None:
    request = await input_processor.prepare(TokensPrompt([5, 6]), SamplingParams(seed=9), CallInfo(request_id="x"))
    assert request.prompt_token_ids == (5, 6)
    assert (request.sampling.seed, request.request_id) == (9, "x")


async def test_chat_begins_with_one_begin_token_only(input_processor: InputProcessor, tokenizer: Tokenizer) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "hi"}])
    request = await input_processor.prepare(prompt, SamplingParams(), CallInfo())
    rendered = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert rendered == "<|bos|><user>hi<assistant>"
    assert request.prompt_token_ids.count(_begin(tokenizer)) == 1


async def test_long_text_gives_the_same_tokens_from_its_thread(
    input_processor: InputProcessor, core: ScriptedCore
) -> None:
    core.limit = 10**6
    text = "lorem ipsum " * 1000
    request = await input_processor.prepare(TextPrompt(text), SamplingParams(), CallInfo())
    assert request.prompt_token_ids == tuple(input_processor.tokenizer.encode(text))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "prompt"),
        (TokensPrompt([]), "prompt"),
        (TokensPrompt([1, 258]), "prompt"),
        (TokensPrompt([-1]), "prompt"),
        (ChatPrompt([]), "messages"),
        (ChatPrompt([{"role": "wizard", "content": "x"}]), "messages"),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_refused_by_field(
    input_processor: InputProcessor, core: ScriptedCore, prompt: Prompt, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await input_processor.prepare(prompt, SamplingParams(), CallInfo())
    assert caught.value.field == field
    assert not core.running


async def test_stop_token_ids_outside_the_vocabulary_are_refused(input_processor: InputProcessor) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await input_processor.prepare(TextPrompt("a"), SamplingParams(stop_token_ids=(1, 999)), CallInfo())
    assert caught.value.field == "stop_token_ids"


async def test_a_prompt_fits_with_one_token_of_answer_and_no_less(input_processor: InputProcessor) -> None:
    request = await input_processor.prepare(TokensPrompt([1] * 99), SamplingParams(), CallInfo())
    assert request.sampling.max_tokens == 1
    with pytest.raises(PromptTooLong) as caught:
        await input_processor.prepare(TokensPrompt([1] * 100), SamplingParams(), CallInfo())
    assert (caught.value.field, caught.value.details["limit"]) == ("prompt", 99)


async def test_too_long_a_chat_names_messages(input_processor: InputProcessor) -> None:
    with pytest.raises(PromptTooLong) as caught:
        await input_processor.prepare(
            ChatPrompt([{"role": "user", "content": "x" * 100}]), SamplingParams(), CallInfo()
        )
    assert caught.value.field == "messages"


async def test_explicit_max_tokens_beyond_the_room_left_is_refused(input_processor: InputProcessor) -> None:
    request = await input_processor.prepare(TokensPrompt([1] * 90), SamplingParams(max_tokens=10), CallInfo())
    assert request.sampling.max_tokens == 10
    with pytest.raises(PromptTooLong) as caught:
        await input_processor.prepare(TokensPrompt([1] * 90), SamplingParams(max_tokens=11), CallInfo())
    assert (caught.value.field, caught.value.details["limit"]) == ("max_tokens", 10)


async def test_a_default_of_max_tokens_bows_to_the_room_left(input_processor: InputProcessor) -> None:
    short = await input_processor.prepare(TokensPrompt([1]), SamplingParams(), CallInfo(), default_max_tokens=16)
    long = await input_processor.prepare(TokensPrompt([1] * 95), SamplingParams(), CallInfo(), default_max_tokens=16)
    assert (short.sampling.max_tokens, long.sampling.max_tokens) == (16, 5)


async def test_min_tokens_beyond_the_resolved_max_tokens_is_refused(input_processor: InputProcessor) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await input_processor.prepare(
            TokensPrompt([1]), SamplingParams(min_tokens=17), CallInfo(), default_max_tokens=16
        )
    assert caught.value.field == "min_tokens"


async def test_an_unknown_model_is_not_found(input_processor: InputProcessor) -> None:
    with pytest.raises(NotFound) as caught:
        await input_processor.prepare(TextPrompt("a"), SamplingParams(), CallInfo(model="gpt-9"))
    assert caught.value.field == "model"


async def test_before_any_worker_connects_the_error_says_what_is_missing(
    input_processor: InputProcessor, core: ScriptedCore
) -> None:
    core.limit, core.reason = 0, "no decode worker is connected"
    with pytest.raises(WorkerLost, match="no decode worker is connected"):
        await input_processor.prepare(TextPrompt("a"), SamplingParams(), CallInfo())


@pytest.mark.parametrize("bad", ["x" * 129, "a b", "a\n", "é", "\x7f"])
def test_request_ids_are_short_and_printable(bad: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_request_id(bad)
    assert caught.value.field == "request_id"
    assert checked_request_id("x" * 128) == "x" * 128
    assert len(checked_request_id("")) == 36


@pytest.mark.parametrize(
    ("configured", "default", "asked", "effective"),
    [
        (0, 3600, 0, 3600),
        (0, 0, 0, 0),
        (30, 3600, 0, 30),
        (30, 20, 0, 20),
        (30, 0, 0, 30),
        (0, 20, 50, 50),
        (0, 20, 5, 5),
        (3, 20, 5, 3),
    ],
)
async def test_a_request_has_its_own_deadline_or_the_default_within_the_longest(
    core: ScriptedCore, tokenizer: Tokenizer, configured: float, default: float, asked: float, effective: float
) -> None:
    assert EdgeSettings().default_timeout_s == 3600
    settings = EdgeSettings(request_timeout_s=configured, default_timeout_s=default)
    input_processor = make_input_processor(core, tokenizer, settings)
    request = await input_processor.prepare(TextPrompt("a"), SamplingParams(), CallInfo(timeout_s=asked))
    assert request.timeout_s == effective


@pytest.mark.parametrize(("truncate_to", "kept"), [(3, 3), (200, 120), (-1, 95), (None, None)])
async def test_a_prompt_may_lose_its_beginning(
    input_processor: InputProcessor, truncate_to: int | None, kept: int | None
) -> None:
    prompt, sampling = TokensPrompt(list(range(120))), SamplingParams(max_tokens=5)
    if kept is None or kept > 99:
        with pytest.raises(PromptTooLong):
            await input_processor.prepare(prompt, sampling, CallInfo(), options=PromptOptions(truncate_to))
        return
    request = await input_processor.prepare(prompt, sampling, CallInfo(), options=PromptOptions(truncate_to))
    assert request.prompt_token_ids == tuple(range(120 - kept, 120))


async def test_bad_words_are_spelled_with_and_without_a_space(
    input_processor: InputProcessor, tokenizer: Tokenizer
) -> None:
    options = PromptOptions(bad_words=("no",))
    request = await input_processor.prepare(TextPrompt("hi"), SamplingParams(), CallInfo(), options=options)
    spelled = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("no", " no")}
    assert set(request.sampling.bad_sequences) == spelled
    recommended = SamplingParams(bad_sequences=((5,), (6, 7)))
    request = await input_processor.prepare(TextPrompt("hi"), recommended, CallInfo(), options=options)
    assert set(request.sampling.bad_sequences) == {(5,), (6, 7), *spelled}
    for words in (("",), ("x" * 257,), ("a",) * 129):
        with pytest.raises(InvalidRequest) as caught:
            await input_processor.prepare(
                TextPrompt("hi"), SamplingParams(), CallInfo(), options=PromptOptions(bad_words=words)
            )
        assert caught.value.field == "bad_words"


async def test_prompts_that_ask_for_log_probabilities_share_no_prefix_with_any_other(
    input_processor: InputProcessor,
) -> None:
    asking = SamplingParams(prompt_logprobs=0)
    salts = {
        (await input_processor.prepare(TextPrompt("hi"), sampling, CallInfo())).chain_salt
        for sampling in (asking, asking, SamplingParams())
    }
    assert len(salts) == 3
