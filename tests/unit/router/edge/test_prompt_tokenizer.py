"""A text that cannot fit is refused before any of it is tokenized."""

from __future__ import annotations

import threading

import pytest

from services.router.edge.limits import LimitSettings
from services.router.edge.text.prompt_tokenizer import ChatPrompt, Prompt, PromptTokenizer, TextPrompt
from shared.errors import PromptTooLong
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.tokenizer import Tokenizer
from tests.unit.router.edge.scripted_core import TEMPLATE

CONTEXT_LEN = 1000


class UnusedTokenizer:
    """A vocabulary whose longest token has 7 characters; tokenizing is an error."""

    longest_token_len = 7
    vocab_size = 258

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("tokenized")


class TightLimits(LimitSettings):
    """A text of more than two characters a token is too long."""

    max_chars_per_token = 2


def prompts(tokenizer: object, template: str = TEMPLATE, limits: LimitSettings | None = None) -> PromptTokenizer:
    chat = ChatTemplate({"default": template}, {"bos_token": "<|bos|>"})
    return PromptTokenizer(tokenizer, chat, limits or LimitSettings())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "field", "limit"),
    [
        (TextPrompt("a" * 7001), "prompt", 7000),
        (ChatPrompt([{"role": "user", "content": "a" * 6997}]), "messages", 7000),
        (ChatPrompt([{"role": "u", "content": ""}] * 1001), "messages", 1000),
    ],
)
async def test_a_text_that_no_tokens_could_spell_is_refused_untokenized(prompt: Prompt, field: str, limit: int) -> None:
    with pytest.raises(PromptTooLong) as caught:
        await prompts(UnusedTokenizer()).token_ids(prompt, CONTEXT_LEN)
    assert (caught.value.field, caught.value.details["limit"]) == (field, limit)


async def test_the_limit_bounds_texts_of_vocabularies_with_long_tokens() -> None:
    with pytest.raises(PromptTooLong) as caught:
        await prompts(UnusedTokenizer(), limits=TightLimits()).token_ids(TextPrompt("a" * 2001), CONTEXT_LEN)
    assert caught.value.details["limit"] == 2000


async def test_a_template_that_repeats_its_messages_is_bounded_too() -> None:
    repeating = "{% for m in messages %}{% for _ in range(9) %}{{ m.content }}{% endfor %}{% endfor %}"
    with pytest.raises(PromptTooLong) as caught:
        await prompts(UnusedTokenizer(), repeating).token_ids(
            ChatPrompt([{"role": "user", "content": "a" * 1000}]), CONTEXT_LEN
        )
    assert caught.value.field == "messages"


async def test_a_text_at_the_bound_is_tokenized(tokenizer: Tokenizer) -> None:
    text = "a" * (100 * tokenizer.longest_token_len)
    ids = await prompts(tokenizer).token_ids(TextPrompt(text), 100)
    assert len(ids) == len(text) + 1


class NotingTokenizer(UnusedTokenizer):
    """Notes in which thread it tokenizes."""

    thread: threading.Thread | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.thread = threading.current_thread()
        return [1]


@pytest.mark.parametrize(
    ("parameters", "is_here"),
    [
        ({"city": 1}, True),
        ({"description": "d" * 3000}, True),
        ({"description": "d" * 5000}, False),
        ({"k" * 5000: 1}, False),
        ({"enum": list(range(5000))}, False),
    ],
)
async def test_long_tools_are_tokenized_in_a_thread_whatever_makes_them_long(parameters, is_here) -> None:
    tokenizer = NotingTokenizer()
    prompt = ChatPrompt([{"role": "user", "content": "a"}], [{"function": {"name": "f", "parameters": parameters}}])
    await prompts(tokenizer).token_ids(prompt, 100_000)
    assert (tokenizer.thread is threading.current_thread()) == is_here
