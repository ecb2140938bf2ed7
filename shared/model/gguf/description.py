"""What a GGUF file's metadata say of its model, as a model folder in Hugging Face layout says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shared.errors import ModelLoadError
from shared.model.gguf.header import GgufHeader, Value

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` → its name in Hugging Face layout."""
_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_CONTROL, _USER_DEFINED, _NORMAL = 3, 4, 1
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}", "gpt-2": None}
"""How text is split before its pairs are merged, by `tokenizer.ggml.pre`; None: as GPT-2 does."""


def plain_name(name: str) -> str:
    """A tensor's name in a checkpoint of Hugging Face layout; of an unknown one its own."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _OF_LAYER:
        return name
    return f"model.layers.{found[1]}.{_OF_LAYER[found[2]]}.{found[3]}"


class _Fields:
    """Metadata by name. Raises ModelLoadError (`field`) for what is missing or of another type."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.prefix = f"{self.text('general.architecture')}."

    def fault(self, name: str, problem: str) -> ModelLoadError:
        file = self.header.path
        return ModelLoadError(f"{file}: {name} {problem}", field=name, file=file.name)

    def own(self, name: str, default: Value | None = None) -> Value | None:
        """A value under the architecture's name."""
        return self.header.metadata.get(self.prefix + name, default)

    def text(self, name: str) -> str:
        found = self.header.metadata.get(name)
        if not isinstance(found, str):
            raise self.fault(name, f"must be a text, found {type(found).__name__}")
        return found

    def size(self, name: str, default: int | None = None) -> int:
        found = self.own(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            shown = f"a list of {len(found)}" if isinstance(found, list) else repr(found)
            raise self.fault(self.prefix + name, f"must be a whole number above 0, found {shown}")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        found = self.own(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise self.fault(self.prefix + name, f"must be a number, found {found!r}")
        return float(found)

    def texts(self, name: str) -> list[str]:
        found = self.header.metadata.get(name)
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise self.fault(name, "must be a list of texts")
        return [str(item) for item in found]

    def token(self, name: str) -> int | None:
        found = self.header.metadata.get(f"tokenizer.ggml.{name}")
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise self.fault(f"tokenizer.ggml.{name}", f"must be a token's id, found {found!r}")
        return found


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The content of `config.json`. Raises ModelLoadError (`field`) for what is missing or not served."""
    fields = _Fields(header)
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise fields.fault("general.architecture", f"is {name}, which is not supported in GGUF; supported: {known}")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for unread in ("expert_count", "attention.sliding_window"):
        if fields.own(unread):
            raise fields.fault(fields.prefix + unread, f"is {fields.own(unread)}, which is not supported in GGUF")
    if "rope_freqs.weight" in shapes or fields.own("rope.scaling.type", "none") != "none":
        raise fields.fault(fields.prefix + "rope.scaling.type", "scales positions, which is not supported in GGUF")
    if "token_embd.weight" not in shapes:
        raise fields.fault("token_embd.weight", "is missing")
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", hidden // heads)
    if fields.size("rope.dimension_count", head_dim) != head_dim:
        raise fields.fault(fields.prefix + "rope.dimension_count", f"must be that of a head, {head_dim}")
    ends = [fields.token(f"{which}_token_id") for which in ("eos", "eot")]
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": fields.token("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "torch_dtype": "bfloat16",
    }


def heads_of(metadata: Mapping[str, Value], name: str) -> int:
    """Heads whose rows lie with neighbours in pairs in a query's or key's projection; 0: they lie in halves."""
    if metadata.get("general.architecture") != "llama":
        return 0
    queries = metadata.get("llama.attention.head_count", 0)
    found = queries if ".attn_q." in name else metadata.get("llama.attention.head_count_kv", queries)
    is_placed = ".attn_q." in name or ".attn_k." in name
    return found if is_placed and isinstance(found, int) else 0


def tokenizer_of(header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`, of vocabularies of byte pairs.

    Raises ModelLoadError (`field`) for another kind of vocabulary, and for one that splits text in an unknown way.
    """
    fields = _Fields(header)
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
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*([split_first] if pattern else []), bytes_alone]},
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
            "ignore_merges": split == "llama-bpe",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in merges],
        },
    }  # fmt: skip
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **texts}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return tokenizer, config
