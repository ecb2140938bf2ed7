"""The official OpenAI client against the real server: it must understand everything we say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from services.router.dispatch.request import FinishReason
from shared.errors import Overloaded
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import MODEL, text_steps

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello there"}]


async def test_a_chat_completion(edge: Edge) -> None:
    edge.says("Grüße, 🎉!", finish=FinishReason.STOP)
    answer = await edge.openai.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=40)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Grüße, 🎉!")
    assert choice.finish_reason == "stop"
    (request,) = edge.core.requests
    assert request.sampling.max_tokens == 40
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == request.num_prompt_tokens
    assert answer.usage.completion_tokens == edge.core.running[0].num_read
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.model_extra is not None
    assert answer.model_extra["tandem"]["ttft"]["ttft_ms"] == 12.25
    assert answer.id == f"chatcmpl-{request.request_id}"
    assert edge.core.running[0].closed.is_set()


async def test_a_chat_stream_has_role_text_finish_and_usage_in_this_order(edge: Edge) -> None:
    edge.says("Hello, wide 🎉 world")
    stream = await edge.openai.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == "Hello, wide 🎉 world"
    assert len([text for text in texts if text]) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["tandem"]["prefill_worker"] == "p0"


async def test_a_completion_with_all_extensions(edge: Edge) -> None:
    edge.says("some words here")
    answer = await edge.openai.completions.create(
        model=MODEL,
        prompt="Say: ",
        echo=True,
        n=2,
        seed=11,
        temperature=0.5,
        extra_body={"top_k": 5, "min_p": 0.1, "return_token_ids": True, "request_id": "mine"},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == ["Say: some words here"] * 2
    first, second = edge.core.requests
    assert (first.request_id, second.request_id) == ("mine-0", "mine-1")
    assert first.sampling.seed == 11
    assert second.sampling.seed != 11
    assert (first.sampling.top_k, first.sampling.max_tokens) == (5, 16)
    assert answer.choices[0].model_extra is not None
    ids = answer.choices[0].model_extra["token_ids"]
    assert edge.tokenizer.decode(ids) == "some words here"
    assert tuple(answer.choices[0].model_extra["prompt_token_ids"]) == first.prompt_token_ids
    assert answer.id == "cmpl-mine"


async def test_a_batch_of_prompts_streams_every_choice_whole(edge: Edge) -> None:
    texts = {"one": "first answer", "two": "the second", "three": "and a third one"}
    prompts = {tuple(edge.tokenizer.encode(prompt)): text for prompt, text in texts.items()}
    edge.core.script = lambda request: text_steps(edge.tokenizer, prompts[request.prompt_token_ids])
    stream = await edge.openai.completions.create(model=MODEL, prompt=list(texts), stream=True)
    found = ["", "", ""]
    finishes = [0, 0, 0]
    async for chunk in stream:
        found[chunk.choices[0].index] += chunk.choices[0].text
        finishes[chunk.choices[0].index] += chunk.choices[0].finish_reason == "length"
    assert found == list(texts.values())
    assert finishes == [1, 1, 1]


async def test_the_model_list_and_one_model(edge: Edge) -> None:
    models = await edge.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await edge.openai.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await edge.openai.models.retrieve("other")


async def test_errors_before_the_first_token_are_the_clients_own_exceptions(start_edge: StartEdge) -> None:
    edge = await start_edge(lambda request: [Overloaded("full", retry_after_s=2.5)], api_keys=("k1",))
    with pytest.raises(openai.RateLimitError) as limited:
        await edge.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert limited.value.response.headers["retry-after"] == "3"
    assert limited.value.code == "overloaded"
    with pytest.raises(openai.NotFoundError):
        await edge.openai.chat.completions.create(model="gpt-9", messages=USER)
    with pytest.raises(openai.BadRequestError) as bad:
        await edge.openai.completions.create(model=MODEL, prompt="x", suffix="y")
    assert bad.value.param == "suffix"
    stranger = edge.openai.with_options(api_key="k2")
    with pytest.raises(openai.AuthenticationError):
        await stranger.models.list()


async def test_the_tokens_of_a_responses_input_are_counted(edge: Edge) -> None:
    given = {"input": "hello there", "instructions": "Be brief."}
    counted = await edge.openai.responses.input_tokens.count(model=MODEL, **given)  # type: ignore[arg-type]
    assert counted.object == "response.input_tokens"
    edge.says("Hi.", finish=FinishReason.STOP)
    answer = await edge.openai.responses.create(model=MODEL, **given)  # type: ignore[call-overload]
    assert answer.usage.input_tokens == counted.input_tokens
    behind = await edge.openai.responses.input_tokens.count(previous_response_id=answer.id, input="More.")
    assert behind.input_tokens > counted.input_tokens
    with pytest.raises(openai.BadRequestError, match=r"text\.verbosity"):
        await edge.openai.responses.input_tokens.count(input="a", text={"verbosity": "high"})
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        await edge.openai.responses.input_tokens.count(input="a", previous_response_id="resp_none")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda client: client.chat.completions.list(), "not stored"),
        (lambda client: client.chat.completions.retrieve("chatcmpl-1"), "not stored"),
        (lambda client: client.chat.completions.update("chatcmpl-1", metadata={"a": "b"}), "not stored"),
        (lambda client: client.chat.completions.delete("chatcmpl-1"), "not stored"),
        (lambda client: client.chat.completions.messages.list("chatcmpl-1"), "not stored"),
        (lambda client: client.responses.compact(model=MODEL, input="a"), "not compacted"),
        (lambda client: client.models.delete(MODEL), "not deleted"),
        (lambda client: client.moderations.create(input="a"), "moderation"),
        (lambda client: client.images.generate(prompt="a"), "images"),
        (lambda client: client.audio.speech.create(input="a", model=MODEL, voice="ash"), "audio"),
        (lambda client: client.audio.transcriptions.create(file=b"a", model=MODEL), "audio"),
        (lambda client: client.vector_stores.list(), "vector stores"),
        (lambda client: client.realtime.client_secrets.create(), "realtime"),
        (lambda client: client.fine_tuning.jobs.list(), "fine-tuning"),
        (lambda client: client.uploads.create(bytes=1, filename="a", mime_type="b", purpose="batch"), "uploads"),
        (lambda client: client.evals.list(), "evals"),
        (lambda client: client.containers.list(), "containers"),
        (lambda client: client.skills.list(), "there is no GET /v1/skills"),
    ],
)
async def test_what_of_openais_api_is_not_here_says_so_and_is_tried_once(
    edge: Edge, call: Callable[[openai.AsyncOpenAI], Awaitable[object]], reason: str
) -> None:
    with pytest.raises(openai.NotFoundError, match=reason) as refused:
        await call(edge.openai)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["code"] == "not_found"
