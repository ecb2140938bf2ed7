"""Token ids to text while they arrive: emit what no later token can change, hold back the rest.

Two ways, by the kind of vocabulary. Byte-level vocabularies (Llama 3, Qwen) map each token to bytes, so
text is the incremental UTF-8 decoding of their concatenation. Others (SentencePiece with byte fallback:
Llama 2, Mistral) have a decoder that looks at neighbours, so it is asked about a few tokens at a time.

Either way the pieces joined equal decoding all ids at once, for any ids.
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
        """Take more token ids; returns the text that has become certain, which may be empty."""
        ...

    def flush(self) -> str:
        """End the answer; returns what was held back, broken bytes as U+FFFD. Push nothing afterwards."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: holds back at most the three bytes of an unfinished character."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` gives a token's bytes, none for tokens that are to be skipped."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        return self._decoder.decode(b"".join(map(self._bytes_of, ids)))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class ContextDetokenizer:
    """For any other vocabulary: decodes new tokens behind the last one emitted, and takes what was added.

    A run of byte tokens is held back until another token ends it: it decodes as a whole, and one broken
    character in it turns all of it into U+FFFD.
    """

    def __init__(self, token_of: Callable[[int], str | None], decode: Callable[[list[int]], str]) -> None:
        """`token_of` gives a token as the vocabulary spells it, None where it is to be skipped."""
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
