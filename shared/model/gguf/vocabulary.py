"""A GGUF file's vocabulary as `tokenizer.json` says it."""

from __future__ import annotations

from typing import Any

from shared.model.gguf.header import GgufHeader
from shared.model.gguf.metadata import Metadata

_CONTROL, _USER_DEFINED, _NORMAL = 3, 4, 1
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
_TEKKEN = _LETTERS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}", "deepseek-r1-qwen": _WORDS % r"\p{N}",
    "tekken": _TEKKEN, "gpt-2": None, "smollm": None,
}  # fmt: skip
"""How text is split before its pairs are merged, by `tokenizer.ggml.pre`; None: as GPT-2 does."""
_OF_ONE_DIGIT = ("smollm",)
"""Of these, those that part digits from each other first."""
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Of these, those that take a word of the vocabulary whole, whatever pairs make it."""
_QWENS = ("qwen2", "deepseek-r1-qwen")


def tokenizer_of(header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`, of vocabularies of byte pairs.

    Raises ModelLoadError (`field`) for another kind of vocabulary, and for one that splits text in an unknown way.
    """
    fields = Metadata(header)
    beside = "put the model's tokenizer.json beside the file"
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise fields.fault("tokenizer.ggml.model", f"is {model}, which is not read: {beside}")
    split = fields.text("tokenizer.ggml.pre")
    if split not in _SPLITS:
        raise fields.fault("tokenizer.ggml.pre", f"is {split}, which is not known ({', '.join(_SPLITS)}): {beside}")
    tokens, merges = fields.texts("tokenizer.ggml.tokens"), fields.texts("tokenizer.ggml.merges")
    kinds = header.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise fields.fault("tokenizer.ggml.token_type", f"must be a list of {len(tokens)} numbers")
    if any(len(pair.split(" ")) != 2 for pair in merges):
        raise fields.fault("tokenizer.ggml.merges", "must be pairs with a space between them")
    pattern = _SPLITS[split]
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": pattern is None}
    split_first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    first_splits: list[dict[str, Any]] = [split_first] if pattern else []
    if split in _OF_ONE_DIGIT:
        first_splits = [{"type": "Digits", "individual_digits": True}]
    named = {which: fields.token(f"{which}_token_id") for which in ("bos", "eos")}
    if any(number is not None and number >= len(tokens) for number in named.values()):
        raise fields.fault("tokenizer.ggml.bos_token_id", f"must be below {len(tokens)}, and so must that of eos")
    texts = {f"{which}_token": tokens[number] for which, number in named.items() if number is not None}
    first = texts.get("bos_token") if header.metadata.get("tokenizer.ggml.add_bos_token") else None
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
                "normalized": False, "special": kind == _CONTROL,
            }
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if split in _QWENS else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first_splits, bytes_alone]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*begin, sequence],
            "pair": [*begin, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": known,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": split in _WHOLE_WORDS,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in merges],
        },
    }  # fmt: skip
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **texts}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return tokenizer, config
