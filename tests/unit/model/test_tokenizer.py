"""The tokenizer against transformers, and its streaming against decoding everything at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from shared.errors import InvalidRequest, ModelLoadError
from shared.model.text.tokenizer import Tokenizer
from tests.examples import examples

from .conftest import byte_level_backend, write_tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces, a tab\tand\n\nlines  ",
    "Grüße, 日本語, emoji 🎉👩‍👩‍👧 and 12345678 numbers",
    "<|begin|>spelled out<|end|> <s> </s> <think>",
    "null\x00byte and \ufffd",
]

_load = cache(Tokenizer.load)


def _per_folder(test: Callable[..., None]) -> Callable[..., None]:
    """Let hypothesis run inside a test that is parametrised by a folder, which never changes."""
    return examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])(test)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_and_decode_equal_auto_tokenizer(tokenizer_folder: Path, text: str, add_special_tokens: bool) -> None:
    ours, theirs = _load(tokenizer_folder), _oracle(tokenizer_folder)
    ids = ours.encode(text, add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_and_sizes_equal_auto_tokenizer(tokenizer_folder: Path) -> None:
    ours, theirs = _load(tokenizer_folder), _oracle(tokenizer_folder)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id


@_per_folder
@given(data=st.data())
def test_streamed_pieces_of_any_ids_join_to_the_decoded_whole(tokenizer_folder: Path, data: st.DataObject) -> None:
    tokenizer = _load(tokenizer_folder)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))
    skip = data.draw(st.booleans())
    stream = tokenizer.stream(skip)
    pieces = []
    while ids_left := ids[sum(len(part) for part, _ in pieces) :]:
        part = ids_left[: data.draw(st.integers(1, 5))]
        pieces.append((part, stream.push(part)))
    assert "".join(text for _, text in pieces) + stream.flush() == tokenizer.decode(ids, skip)


@_per_folder
@given(text=st.text(max_size=30))
def test_streamed_text_is_never_taken_back_and_never_shows_half_a_character(tokenizer_folder: Path, text: str) -> None:
    tokenizer = _load(tokenizer_folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    stream = tokenizer.stream()
    seen = ""
    for token_id in ids:
        seen += stream.push([token_id])
        assert whole.startswith(seen)
    assert seen + stream.flush() == whole


@given(data=st.binary(max_size=24), cut=st.integers(0, 24))
def test_byte_level_stream_of_broken_utf8_replaces_what_decoding_at_once_replaces(
    byte_level_folder: Path, data: bytes, cut: int
) -> None:
    tokenizer = _load(byte_level_folder)
    ids = _byte_ids(byte_level_folder, data)
    stream = tokenizer.stream()
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.flush() == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


@given(data=st.binary(max_size=24), cut=st.integers(0, 24))
def test_byte_fallback_stream_of_broken_utf8_replaces_what_decoding_at_once_replaces(
    byte_fallback_folder: Path, data: bytes, cut: int
) -> None:
    tokenizer = _load(byte_fallback_folder)
    ids = [3 + byte for byte in data] + tokenizer.encode("fox", add_special_tokens=False)
    stream = tokenizer.stream()
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.flush() == tokenizer.decode(ids)


def test_stream_emits_ascii_at_once_and_holds_back_an_unfinished_character(byte_level_folder: Path) -> None:
    tokenizer = _load(byte_level_folder)
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("fox", add_special_tokens=False)) == "fox"
    first, *rest = _byte_ids(byte_level_folder, "🚀".encode())
    assert stream.push([first]) == ""
    assert stream.push(rest) == "🚀"
    assert stream.push([first]) == ""
    assert stream.flush() == "\ufffd"


def test_token_texts_join_to_the_text_with_its_spaces(tokenizer_folder: Path) -> None:
    tokenizer = _load(tokenizer_folder)
    ids = tokenizer.encode("the lazy dog again", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).lstrip() == "the lazy dog again"


def test_text_with_half_a_surrogate_pair_is_an_invalid_request(byte_level_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="character 2") as caught:
        _load(byte_level_folder).encode("ab\ud800")
    assert caught.value.field == "prompt"


def test_truncation_and_padding_saved_with_the_tokenizer_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    write_tokenizer(tmp_path, backend)
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("one two three four five six")) > 4
    assert len(tokenizer.encode("fox", add_special_tokens=False)) < 4


@pytest.mark.parametrize("legacy", [False, True])
def test_tokens_declared_only_in_the_config_become_units_as_in_auto_tokenizer(tmp_path: Path, legacy: bool) -> None:
    declared = {
        "eos_token": {"content": "<|new-end|>", "lstrip": False, "rstrip": True, "normalized": False},
        "additional_special_tokens": ["<|extra|>"],
        "pad_token": "<|begin|>",
    }
    if legacy:
        write_tokenizer(tmp_path, byte_level_backend(), bos_token="<|begin|>")
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(declared))
    else:
        numbered = {
            "500": {"content": "<tool>", "special": False},
            "501": {"content": "<|extra|>", "special": True},
        }
        write_tokenizer(
            tmp_path,
            byte_level_backend(),
            **{**declared, "eos_token": "<|new-end|>"},
            bos_token="<|begin|>",
            add_bos_token=False,  # has no say over the template in tokenizer.json
            image_token="<|image|>",
            added_tokens_decoder=numbered,
        )
    ours, theirs = Tokenizer.load(tmp_path), _oracle(tmp_path)
    text = "a<|new-end|>  b<|extra|>c<tool>d<|image|>e"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id


def test_missing_and_corrupt_tokenizer_files_name_the_file(tmp_path: Path, byte_level_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.details["file"] == "tokenizer.json"
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing .*; tokenizer\.model is not read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelLoadError, match="not a valid tokenizer"):
        Tokenizer.load(tmp_path)
    shutil.copy(byte_level_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 7}')
    with pytest.raises(ModelLoadError, match="bos_token") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.field == "bos_token"


def _byte_ids(folder: Path, data: bytes) -> list[int]:
    """Token ids that spell single bytes of a byte-level vocabulary."""
    tokenizer = _load(folder)
    by_byte = {tokenizer._token_bytes(number): number for number in reversed(range(tokenizer.vocab_size))}
    return [by_byte[bytes([byte])] for byte in data]


@cache
def _oracle(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)
