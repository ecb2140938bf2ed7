"""Incremental detokenization: emit text that no later token can change, hold back the rest.

Two ways, by the kind of vocabulary. Byte-level vocabularies (Llama 3, Qwen) map each token to bytes, so the text is the
incremental UTF-8 decoding of their concatenation. Others (SentencePiece with byte fallback: Llama 2, Mistral) have a
decoder that depends on neighbouring tokens, so it decodes a few tokens at a time.

Either way the joined pieces equal the decoding of all ids at once, for any ids.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One answer's text, piece by piece. Not safe for calls from two threads at once."""

    def push(self, ids: Sequence[int]) -> str:
        """Take more token ids; returns the text that is now final, perhaps empty."""
        ...

    def flush(self) -> str:
        """End the answer; returns the text held back, invalid bytes as U+FFFD. Push nothing afterwards."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: holds back at most the three bytes of an unfinished character."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` returns a token's bytes, empty for tokens to skip."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        return self._decoder.decode(b"".join(map(self._bytes_of, ids)))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class ContextDetokenizer:
    """For any other vocabulary: decodes new tokens after the last one emitted, and takes the text that they add.

    A run of byte tokens is held back until another token ends it: it decodes as a whole, and one invalid character in
    it turns all of it into U+FFFD.
    """

    def __init__(self, token_of: Callable[[int], str | None], decode: Callable[[list[int]], str]) -> None:
        """`token_of` returns a token's text in the vocabulary, None for tokens to skip."""
        self._token_of = token_of
        self._decode = decode
        self._context: list[int] = []  # the last token whose text was emitted
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        certain = 0
        for token_id in ids:
            token = self._token_of(token_id)
            if token is None:
                continue
            self._held.append(token_id)
            if not _BYTE_TOKEN.fullmatch(token):
                certain = len(self._held)
        if not certain:
            return ""
        before = self._decode(self._context)
        after = self._decode(self._context + self._held[:certain])
        if after.endswith(_REPLACEMENT) or not after.startswith(before):
            return ""
        self._context = self._held[certain - 1 : certain]
        del self._held[:certain]
        return after[len(before) :]

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = self._decode(self._context + self._held)[len(self._decode(self._context)) :]
        self._held.clear()
        return text
