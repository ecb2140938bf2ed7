"""Log-probabilities in the shapes of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.router.dispatch.request import TokenLogprobs
from shared.model.text.tokenizer import Tokenizer

_FLOOR = -9999.0
"""JSON has no infinity; OpenAI's value for a token that cannot be."""


Spelling = Callable[[int], str]
"""Gives the text of a token id in lists of log-probabilities."""


def spelling(tokenizer: Tokenizer, as_ids: bool | None) -> Spelling:
    """By their texts, or as vLLM's `return_tokens_as_token_ids` has it."""
    return "token_id:{}".format if as_ids else tokenizer.token_text


class CompletionLogprobs:
    """`logprobs` of one completion choice, in parts; offsets are characters from the start of its text."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), as_ids: bool | None = None) -> None:
        """`before`: tokens of the choice that came on an earlier call; `as_ids`: see `spelling`."""
        self._tokenizer = tokenizer
        self._named = spelling(tokenizer, as_ids)
        self.has_begun = False
        """Whether some tokens were described."""
        self._offset = sum(len(tokenizer.token_text(token_id)) for token_id in before)

    def part(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[object]]:
        """The four parallel lists for the next tokens; tops hold the chosen token beside the likeliest."""
        self.has_begun = True
        part: dict[str, list[object]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            token = self._named(token_id)
            chosen = max(entry.logprob, _FLOOR)
            # Two ids may share a text: the likelier one, listed first, keeps its value.
            top: dict[str, float] = {}
            for t, value in entry.top:
                top.setdefault(self._named(t), max(value, _FLOOR))
            top[token] = chosen
            part["text_offset"].append(self._offset)
            part["token_logprobs"].append(chosen)
            part["tokens"].append(token)
            part["top_logprobs"].append(top)
            self._offset += len(self._tokenizer.token_text(token_id))
        return part

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[object]]:
        """The lists for an echoed prompt: nothing comes before its first token, which has none."""
        offset = self._offset
        self._offset += len(self._tokenizer.token_text(token_ids[0]))
        part = self.part(token_ids[1:], logprobs)
        part["text_offset"].insert(0, offset)
        part["token_logprobs"].insert(0, None)
        part["tokens"].insert(0, self._named(token_ids[0]))
        part["top_logprobs"].insert(0, None)
        return part


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, it and the likeliest by their ids."""
    found: list[dict[str, object] | None] = [None]
    for token_id, entry in zip(token_ids[1:], logprobs, strict=True):
        ranks = {t: rank for rank, (t, _) in enumerate(entry.top, 1)}
        values = {token_id: entry.logprob, **dict(entry.top)}
        found.append(
            {
                str(t): {
                    "logprob": max(value, _FLOOR),
                    "rank": ranks.get(t),
                    "decoded_token": tokenizer.token_text(t),
                }
                for t, value in values.items()
            }
        )
    return found


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], as_ids: bool | None = None
) -> list[object]:
    """`logprobs.content` for some tokens; `as_ids`: see `spelling`."""
    named = spelling(tokenizer, as_ids)
    return [
        {
            **_chat_entry(tokenizer, named, token_id, entry.logprob),
            "top_logprobs": [_chat_entry(tokenizer, named, t, value) for t, value in entry.top],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _chat_entry(tokenizer: Tokenizer, named: Spelling, token_id: int, logprob: float) -> dict[str, object]:
    """A token that is only a part of a character has no bytes here: OpenAI allows null."""
    text = tokenizer.token_text(token_id)
    spelled = None if "\ufffd" in text else list(text.encode())
    return {"token": named(token_id), "logprob": max(logprob, _FLOOR), "bytes": spelled}
