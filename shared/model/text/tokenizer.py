"""Text to token ids and back, from `tokenizer.json` and `tokenizer_config.json`.

An answer is detokenized as it grows: text that no later token can change leaves at once, the rest is held back.
Byte-level vocabularies (Llama 3, Qwen) map each token to bytes, so the text is the incremental UTF-8 decoding of their
concatenation. Others (SentencePiece with byte fallback: Llama 2, Mistral) have a decoder that depends on neighbouring
tokens, so it decodes a few tokens at a time. Either way the joined pieces equal the decoding of all ids at once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Protocol

import tokenizers

from shared.errors import InvalidRequest, ModelLoadError
from shared.model.config.folder import TOKENIZER_FILE, check_folder, check_is_content
from shared.model.text.tokenizer_settings import TokenizerSettings

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_OTHER_FILES = ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json")
"""Vocabularies in forms that transformers converts."""


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


class Tokenizer:
    """A model's vocabulary. Safe to use from several threads at once.

    A rendered chat prompt already contains its special tokens: encode it with `add_special_tokens=False`, or the
    begin token would appear twice.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        """Use `load`; `special_tokens` maps roles such as `bos_token` to their text."""
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added.items() if token.special)
        self._byte_of_char = _byte_of_char() if _is_byte_level(backend) else None
        self._bytes: dict[int, bytes] = {}  # filled on demand
        self._texts: dict[int, str] = {}  # likewise

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder.

        Raises:
            ModelLoadError: there is no such folder (`field`); `tokenizer.json` is missing or corrupt, or
                `tokenizer_config.json` is (`file`).
        """
        check_folder(folder)
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            other = next((name for name in _OTHER_FILES if (folder / name).is_file()), None)
            hint = f"; {other} is not read: save it by transformers' AutoTokenizer, which writes {TOKENIZER_FILE}"
            raise ModelLoadError(
                f"{TOKENIZER_FILE} is missing from {folder}{hint if other else ''}", file=TOKENIZER_FILE
            )
        check_is_content(path)
        settings = TokenizerSettings.load(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"{path} is not a valid tokenizer: {error}", file=TOKENIZER_FILE) from error
        # Never truncate or pad prompts, whatever the file says.
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, settings)
        return cls(backend, settings.special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's `vocab_size` may be padded beyond it."""
        return self._vocab_size

    @property
    def longest_token_len(self) -> int:
        """Characters of the vocabulary's longest token as spelled there: byte-level vocabularies spell one a byte."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Text of the special tokens by role, such as `bos_token`."""
        return self._special_tokens

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token; the model's configuration may name more."""
        return self._role_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in the text become those tokens.

        Args:
            text: any length.
            add_special_tokens: whether to add the tokens that the model expects around a text, such as BOS.

        Raises:
            InvalidRequest: the text has an unpaired surrogate, which UTF-8 cannot encode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"prompt is not valid Unicode at character {error.start}",
                field="prompt",
                position=error.start,
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary are dropped."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, kept: AbstractSet[str] = frozenset()) -> Detokenizer:
        """A decoder for one answer's ids as they arrive; special tokens whose text is in `kept` are not skipped."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if kept:
            skipped -= {number for text in kept if (number := self._backend.token_to_id(text)) is not None}
        if self._byte_of_char is not None:
            return ByteDetokenizer(lambda number: b"" if number in skipped else self._token_bytes(number))
        return ContextDetokenizer(
            lambda number: None if number in skipped else self._backend.id_to_token(number),
            lambda ids: self._backend.decode(ids, skip_special_tokens=False),
        )

    def token_text(self, token_id: int) -> str:
        """A token's text as inside a sentence, with its leading space; an incomplete character is U+FFFD."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self._text_inside(token_id)
        return known

    def _text_inside(self, token_id: int) -> str:
        once = self._backend.decode([token_id], skip_special_tokens=False)
        if self._byte_of_char is not None:
            return once
        # Some vocabularies drop the first token's space: decode the token twice and take the second.
        return self._backend.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def to_json(self) -> str:
        """The vocabulary as a `tokenizer.json`, with the tokens that `tokenizer_config.json` adds."""
        return self._backend.to_str()

    def _role_id(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            assert self._byte_of_char is not None
            token = self._backend.id_to_token(token_id) or ""
            codes = [self._byte_of_char.get(char) for char in token]
            # An added token may have characters outside the alphabet; then its text is encoded as it is.
            spelled = [code for code in codes if code is not None]
            known = bytes(spelled) if len(spelled) == len(codes) else token.encode("utf-8")
            self._bytes[token_id] = known
        return known


def _add_missing(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Add the declared tokens that `tokenizer.json` lacks."""
    present = backend.get_added_tokens_decoder().values()
    known = {repr(token) for token in present}
    numbered = [token for token in settings.numbered if repr(token) not in known]
    units = {token.content for token in present} | {token.content for token in numbered}
    special = [token for token in settings.special if token.content not in units]
    if numbered or special:
        backend.add_tokens([*numbered, *special])


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts] == ["ByteLevel"]


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level vocabularies (GPT-2, Radford et al. 2019): one printable character a byte.

    Printable Latin-1 bytes map to themselves; the others to U+0100 and up, in order.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
