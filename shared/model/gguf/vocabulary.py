"""A GGUF file's vocabulary as `tokenizer.json` says it."""

from __future__ import annotations

from typing import Any, NamedTuple

from shared.model.gguf.header import GgufHeader, Value
from shared.model.gguf.metadata import Metadata

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Kinds of tokens."""
_SENTENCEPIECE = "llama"
_MODELS = ("gpt2", _SENTENCEPIECE)
_SPACE = "\u2581"
_BESIDE = "put the model's tokenizer.json beside the file"
_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_TEKKEN = _LETTERS % ("", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS
_O200K = _LETTERS % (f"{_ENDS}?", f"{_ENDS}?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS


class _Split(NamedTuple):
    """How text is split before its pairs are merged."""

    pattern: str | None = None  # None: as GPT-2 does
    parts_digits: bool = False  # from each other, first
    takes_words: bool = False  # a word of the vocabulary stays whole, whatever pairs make it
    is_normalized: bool = False  # composed (NFC)
    begins: bool = False  # a prompt has the begin token also where the file does not say so


_QWEN = _Split(_WORDS % r"\p{N}", is_normalized=True)
_CL100K = _Split(_WORDS % r"\p{N}{1,3}")
_LLAMA3 = _CL100K._replace(takes_words=True)
_CODE = _Split(parts_digits=True)
_SPLITS = {
    "llama-bpe": _LLAMA3._replace(begins=True),
    "glm4": _LLAMA3,
    "chatglm-bpe": _CL100K,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "gpt-4o": _Split(_O200K),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": _Split(_TEKKEN, takes_words=True, begins=True),
    "gpt-2": _Split(),
    "olmo": _Split(),
    "smollm": _CODE,
    "refact": _CODE,
    "starcoder": _CODE,
}
"""By `tokenizer.ggml.pre`."""
_ENDS_OF_TURNS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>",
    "<|end_of_text|>",
))  # fmt: skip
"""Texts of tokens that end an answer: many files name only one of theirs, or none that ends a turn."""


def ends_of(header: GgufHeader) -> list[int]:
    """Ids of the tokens that end an answer by their texts, as llama.cpp knows them."""
    tokens, kinds = (header.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return []
    # Where answers are returned, that mark ends one of their messages.
    ends = _ENDS_OF_TURNS - {"<|end|>"} if "<|return|>" in tokens else _ENDS_OF_TURNS
    named = enumerate(zip(tokens, kinds, strict=False))
    return [number for number, (token, kind) in named if token in ends and kind in (_CONTROL, _USER_DEFINED)]


def tokenizer_of(header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`.

    Raises ModelLoadError (`field`) for a vocabulary of another kind than byte pairs and SentencePiece's pairs, and for
    one that splits text in an unknown way.
    """
    fields = Metadata(header)
    model = fields.text("tokenizer.ggml.model")
    if model not in _MODELS:
        raise fields.fault("tokenizer.ggml.model", f"is {model}, which is not read ({', '.join(_MODELS)}): {_BESIDE}")
    tokens = fields.texts("tokenizer.ggml.tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise fields.fault("tokenizer.ggml.token_type", f"must be a list of {len(tokens)} numbers")
    named = {which: fields.token(f"{which}_token_id") for which in ("bos", "eos")}
    if any(number is not None and number >= len(tokens) for number in named.values()):
        raise fields.fault("tokenizer.ggml.bos_token_id", f"must be below {len(tokens)}, and so must that of eos")
    texts = {f"{which}_token": tokens[number] for which, number in named.items() if number is not None}
    split = _SPLITS.get(str(header.metadata.get("tokenizer.ggml.pre")), _Split())
    begins = header.metadata.get("tokenizer.ggml.add_bos_token", model == _SENTENCEPIECE or split.begins)
    first = texts.get("bos_token") if begins else None
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    begin = [] if first is None else [{"SpecialToken": {"id": first, "type_id": 0}}]
    known = {} if first is None else {first: {"id": first, "ids": [tokens.index(first)], "tokens": [first]}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": kind != _USER_DEFINED,
            }
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*begin, sequence],
            "pair": [*begin, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": known,
        },
        **(_sentencepiece if model == _SENTENCEPIECE else _byte_pairs)(fields, tokens, kinds),
    }  # fmt: skip
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **texts}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return tokenizer, config


def _byte_pairs(fields: Metadata, tokens: list[str], _kinds: list[Value]) -> dict[str, Any]:
    name = fields.text("tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise fields.fault("tokenizer.ggml.pre", f"is {name}, which is not known ({', '.join(_SPLITS)}): {_BESIDE}")
    split = _SPLITS[name]
    merges = fields.texts("tokenizer.ggml.merges")
    if any(len(pair.split(" ")) != 2 for pair in merges):
        raise fields.fault("tokenizer.ggml.merges", "must be pairs with a space between them")
    first: list[dict[str, Any]] = []
    if split.pattern is not None:
        first = [{"type": "Split", "pattern": {"Regex": split.pattern}, "behavior": "Isolated", "invert": False}]
    elif split.parts_digits:
        first = [{"type": "Digits", "individual_digits": True}]
    as_gpt2 = split.pattern is None
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": as_gpt2}
    return {
        "normalizer": {"type": "NFC"} if split.is_normalized else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, of_bytes]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _merging(tokens, [pair.split(" ") for pair in merges], ignore_merges=split.takes_words),
    }


def _sentencepiece(fields: Metadata, tokens: list[str], kinds: list[Value]) -> dict[str, Any]:
    """Pieces with scores, of which that pair is merged first whose whole has the highest; spaces are written as `▁`,
    and what no piece has is spelled in bytes."""
    found = fields.header.metadata.get("tokenizer.ggml.scores")
    scores = [float(score) for score in found if isinstance(score, int | float)] if isinstance(found, list) else None
    if scores is None or len(scores) != len(tokens):
        raise fields.fault("tokenizer.ggml.scores", f"must be a list of {len(tokens)} numbers")
    if fields.header.metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise fields.fault("tokenizer.ggml.precompiled_charsmap", f"is not read: {_BESIDE}")
    places = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, list[str]]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        cuts = range(1, len(token)) if kind == _NORMAL else ()
        pairs = [[token[:cut], token[cut:]] for cut in cuts if token[:cut] in places and token[cut:] in places]
        pairs.sort(key=lambda pair: (places[pair[0]], places[pair[1]]))
        merges += [(score, len(left), len(right), [left, right]) for left, right in pairs]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    has_prefix = bool(fields.header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    from_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, from_space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _merging(tokens, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merging(tokens: list[str], merges: list[list[str]], **settings: object) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges, **settings,
    }  # fmt: skip
