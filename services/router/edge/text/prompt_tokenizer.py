"""Prompts to token ids: bounded before any work is done, and off the event loop where the text is long."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.router.edge.limits import LimitSettings
from shared.errors import InvalidRequest, PromptTooLong, brief
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.template_traits import JsonValue
from shared.model.text.tokenizer import Tokenizer

ChatMessage = Mapping[str, JsonValue]

_EFFORT = "reasoning_effort"
_THINKING = "enable_thinking"

_TOOLS_BEGIN = """\
You may call one or more functions to help with the request. Their signatures, one a line:
<tools>
"""
_TOOLS_END = """
</tools>
To call a function, write its name and arguments as a JSON object between tags:
<tool_call>
{"name": "the function's name", "arguments": {"an argument": "its value"}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, and what else the model's chat template reads."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, JsonValue]] = ()
    variables: Mapping[str, JsonValue] = field(default_factory=dict)  # chat_template_kwargs
    reasoning_effort: str | None = None
    verbosity: str | None = None
    documents: Sequence[Mapping[str, JsonValue]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer is the rest of the last message, an assistant's
    add_special_tokens: bool = False  # the tokenizer's own, besides those that the template writes

    @property
    def num_chars(self) -> int:
        """Characters of all that the client wrote."""
        return sum(_num_chars(written) for written in (self.messages, self.tools, self.variables, self.documents))


def rendered(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The prompt's text. A template without tools gets them in a system message, and their answers from the user.

    Raises InvalidRequest naming what the model's template has no place for: `reasoning_effort`, `verbosity`, or
    messages that it refuses.
    """
    messages, tools = prompt.messages, list(prompt.tools)
    if template.available and not template.knows_tools:
        messages, tools = _instructed([_without_tools(message) for message in messages], tools), []
    return template.render(
        messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        tools=tools or None,
        documents=prompt.documents,
        variables={**prompt.variables, **_effort(template, prompt), **_verbosity(template, prompt)},
    )


def _effort(template: ChatTemplate, prompt: ChatPrompt) -> dict[str, JsonValue]:
    """The reasoning effort as the template's own variable, or as its switch where it only has one."""
    effort = prompt.reasoning_effort
    if effort is None:
        return {}
    if template.mentions(_EFFORT):
        return {_EFFORT: effort}
    if template.mentions(_THINKING):
        return {_THINKING: effort != "none"}
    if effort == "none":
        return {}
    raise InvalidRequest(
        f"{_EFFORT}: this model's chat template has no reasoning effort, leave it out or say 'none'", field=_EFFORT
    )


def _verbosity(template: ChatTemplate, prompt: ChatPrompt) -> dict[str, JsonValue]:
    if prompt.verbosity is None:
        return {}
    if template.mentions("verbosity"):
        return {"verbosity": prompt.verbosity}
    if prompt.verbosity == "medium":  # as if it had not been said
        return {}
    raise InvalidRequest(
        "verbosity: this model's chat template has none, leave it out or say 'medium'", field="verbosity"
    )


def _instructed(messages: list[ChatMessage], tools: Sequence[Mapping[str, JsonValue]]) -> list[ChatMessage]:
    """The messages with the tools at the end of a system message that comes first."""
    if not tools:
        return messages
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _TOOLS_BEGIN + lines + _TOOLS_END
    if messages and messages[0].get("role") in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_tools(message: ChatMessage) -> ChatMessage:
    """Calls as the text that they were, and a tool's answer as a user's message."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    written = [str(message["content"])] if message.get("content") else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            name = json.dumps(function.get("name"), ensure_ascii=False)
            arguments = function.get("arguments")
            written.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return {"role": "assistant", "content": "\n".join(written)}


def _num_chars(value: JsonValue) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    if isinstance(value, Sequence):
        return sum(map(_num_chars, value))
    return 0


def _num_others(value: JsonValue) -> int:
    """What `_num_chars` leaves out of what templates write: characters of names of members, and one for each number."""
    if isinstance(value, str):
        return 0
    if isinstance(value, Mapping):
        return sum(len(name) + _num_others(one) for name, one in value.items())
    if isinstance(value, Sequence):
        return sum(map(_num_others, value))
    return 1


MAX_BAD_WORDS = 128
MAX_BAD_WORD_LEN = 256


def check_bad_words(words: Sequence[str]) -> None:
    """Raises InvalidRequest (`bad_words`)."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS} are served",
            field="bad_words",
            limit=MAX_BAD_WORDS,
        )
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_LEN:
            raise InvalidRequest(
                f"bad_words must have 1 to {MAX_BAD_WORD_LEN} characters each, got {brief(word, 40)!r}",
                field="bad_words",
                limit=MAX_BAD_WORD_LEN,
            )


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
            num_chars += sum(map(_num_others, (*prompt.tools, prompt.variables, *prompt.documents)))
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
        checked = tuple(token_ids)  # a message's repeated field makes a new int of each element that is looked at
        self.check_token_ids("prompt", checked)
        return checked

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
        token_ids = tuple(self.tokenizer.encode(text, prompt.add_special_tokens))
        if not token_ids:
            raise InvalidRequest("messages render to an empty prompt", field="messages")
        return token_ids
