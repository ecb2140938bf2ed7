"""From a prefix as an operator names it (text, token ids, messages) to the tokens that requests share."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import InvalidRequest
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.tokenizer import Tokenizer
from shared.rpc.pb.tandem.v1 import cache_pb2

_PROBES = ("a", "1")
"""Two user messages that begin with different tokens: the tokens that their prompts share are the system prompt's."""


class PrefixReader:
    """Tokenizes a prefix in the same way as a request that begins with it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def token_ids(self, request: cache_pb2.PinPrefixRequest) -> list[int]:
        """The prefix's tokens. Raises InvalidRequest naming the field."""
        match request.WhichOneof("prefix"):
            case "text":
                return list(self._tokenizer.encode(request.text))
            case "tokens":
                return self._checked(list(request.tokens.ids))
            case "chat":
                return self._render([{"role": m.role, "content": m.content} for m in request.chat.messages])
            case "system":
                system = {"role": "system", "content": request.system}
                return _common(*(self._render([system, {"role": "user", "content": probe}]) for probe in _PROBES))
            case _:
                raise InvalidRequest("prefix is missing: set text, tokens, chat or system", field="prefix")

    def _render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        # The template writes the special tokens itself.
        return list(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False))

    def _checked(self, token_ids: list[int]) -> list[int]:
        limit = self._tokenizer.vocab_size
        if token_ids and max(token_ids) >= limit:
            raise InvalidRequest(
                f"prefix: token id {max(token_ids)} is outside the vocabulary of {limit}",
                field="prefix",
                limit=limit - 1,
            )
        return token_ids


def _common(first: list[int], second: list[int]) -> list[int]:
    """The longest common prefix."""
    same = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    return first[:same]
