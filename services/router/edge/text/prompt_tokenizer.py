"""Prompts to token ids: bounded before any work is done, and off the event loop where the text is long."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.router.edge.limits import LimitSettings
from services.router.edge.text.chat_prompt import ChatPrompt, rendered
from shared.errors import InvalidRequest, PromptTooLong
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.tokenizer import Tokenizer

_INLINE_TEXT_LEN = 4096
"""Longer texts, in characters, are tokenized in a thread: the event loop streams other requests meanwhile."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A plain text, tokenized with the tokens that the model expects around it."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


Prompt = TextPrompt | TokensPrompt | ChatPrompt


def check_num_tokens(num_prompt_tokens: int, context_len: int, prompt_field: str) -> None:
    """Raises PromptTooLong where no token fits behind the prompt."""
    if num_prompt_tokens >= context_len:
        raise PromptTooLong(
            f"{prompt_field} is too long: {num_prompt_tokens} tokens, "
            f"but {context_len} fit in all and 1 must be left for the answer",
            field=prompt_field,
            limit=context_len - 1,
            value=num_prompt_tokens,
        )


def _yield_to_the_loop() -> None:
    """Lowers this thread's priority: where cores are short, the event loop goes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class PromptTokenizer:
    """Renders and tokenizes. Any number of calls at once; long texts share a few threads.

    The tokenizer releases the interpreter's lock while it works, so a thread is enough to keep the loop free. What
    holds the lock (ids to Python objects) is bounded with the text.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate, limits: LimitSettings) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._chars_per_token = min(tokenizer.longest_token_len, limits.max_chars_per_token)
        self._threads = ThreadPoolExecutor(limits.tokenizer_threads, "tokenizer", initializer=_yield_to_the_loop)

    async def token_ids(self, prompt: Prompt, context_len: int) -> tuple[int, ...]:
        """The prompt's token ids, at least one, all in the vocabulary.

        Raises InvalidRequest for an empty prompt, ids outside the vocabulary and what the template refuses, and
        PromptTooLong for a text that cannot fit in `context_len` tokens, which is known before it is tokenized.
        """
        if isinstance(prompt, TokensPrompt):
            return self._checked_ids(prompt.token_ids, context_len)
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise InvalidRequest("prompt must not be empty", field="prompt", limit="at least 1 character")
            num_chars = len(prompt.text)
            self._check_len("prompt", num_chars, context_len)
        else:
            num_chars = self._message_chars(prompt, context_len)
        if num_chars <= _INLINE_TEXT_LEN:
            return self._encode(prompt, context_len)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, prompt, context_len)

    def check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest (`name`) for an id outside the vocabulary."""
        vocab_size = self.tokenizer.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise InvalidRequest(
                f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}",
                field=name,
                limit=f"0 to {vocab_size - 1}",
                value=wrong,
            )

    def bad_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids that spell each word at the beginning of a text and behind a space."""
        spellings = (text for word in words for text in (word.strip(), " " + word.strip()))
        encoded = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
        return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

    def _checked_ids(self, token_ids: Sequence[int], context_len: int) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidRequest("prompt must not be empty", field="prompt", limit="at least 1 token")
        check_num_tokens(len(token_ids), context_len, "prompt")
        self.check_token_ids("prompt", token_ids)
        return tuple(token_ids)

    def _message_chars(self, prompt: ChatPrompt, context_len: int) -> int:
        """Characters of all messages. Every message takes a token at least: the template marks its role."""
        if len(prompt.messages) > context_len:
            raise PromptTooLong(
                f"messages is too long: {len(prompt.messages)} messages, but {context_len} tokens fit in all",
                field="messages",
                limit=context_len,
                value=len(prompt.messages),
            )
        num_chars = prompt.num_chars
        self._check_len("messages", num_chars, context_len)
        return num_chars

    def _check_len(self, field: str, num_chars: int, context_len: int) -> None:
        limit = context_len * self._chars_per_token
        if num_chars > limit:
            raise PromptTooLong(
                f"{field} is too long: {num_chars} characters, but {context_len} tokens fit in all, "
                f"and a text of more than {limit} characters is not tokenized",
                field=field,
                limit=limit,
                value=num_chars,
            )

    def _encode(self, prompt: TextPrompt | ChatPrompt, context_len: int) -> tuple[int, ...]:
        if isinstance(prompt, TextPrompt):
            return tuple(self.tokenizer.encode(prompt.text, prompt.add_special_tokens))
        text = rendered(self._chat_template, prompt)
        self._check_len("messages", len(text), context_len)  # a template may repeat what it was given
        # The template writes the special tokens itself.
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if not token_ids:
            raise InvalidRequest("messages render to an empty prompt", field="messages")
        return token_ids
