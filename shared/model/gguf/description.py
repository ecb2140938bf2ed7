"""What a GGUF file's metadata say of its model, as `config.json` says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.model.config.layer_config import FULL, SLIDING
from shared.model.gguf.architectures import (
    ARCHITECTURES,
    CHANGING,
    LOCAL_BASE,
    LOGIT_CAP,
    MULTIPLIERS,
    PATTERN,
    SCORE_CAP,
    WINDOW,
)
from shared.model.gguf.header import GgufHeader
from shared.model.gguf.metadata import Metadata
from shared.model.gguf.positions import positions_of
from shared.model.gguf.vocabulary import ends_of


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The content of `config.json`. Raises ModelLoadError (`field`) for what is missing or not served."""
    fields = Metadata(header)
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise fields.fault("general.architecture", f"is {name}, which is not supported in GGUF; supported: {known}")
    architecture = ARCHITECTURES[name]
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for each in CHANGING:
        if (found := fields.own(each)) and each not in architecture.reads:
            raise fields.fault(fields.prefix + each, f"is {found}, which is not supported in GGUF for {name}")
    if "token_embd.weight" not in shapes:
        raise fields.fault("token_embd.weight", "is missing")
    if fields.size("block_count") > len(shapes):
        raise fields.fault(fields.prefix + "block_count", f"must be at most the file's {len(shapes)} tensors")
    hidden, heads, head_dim = fields.size("embedding_length"), fields.size("attention.head_count"), _head_dim(fields)
    rotated = fields.size("rope.dimension_count", head_dim)
    if rotated != head_dim and not (architecture.is_partial and rotated < head_dim and rotated % 2 == 0):
        raise fields.fault(fields.prefix + "rope.dimension_count", f"must be that of a head, {head_dim}")
    ends = [*(fields.token(f"{which}_token_id") for which in ("eos", "eot")), *ends_of(header)]
    shared = {
        "architectures": [architecture.family],
        "model_type": architecture.model_type,
        **positions_of(fields, rotated),
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
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": fields.token("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "torch_dtype": "bfloat16",
    }
    return {**shared, **_OWN[name](fields)} if name in _OWN else shared


def _llama(fields: Metadata) -> dict[str, Any]:
    if not fields.own("expert_count"):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "num_local_experts": fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count"),
    }  # fmt: skip


def _qwen3moe(fields: Metadata) -> dict[str, Any]:
    return {
        "num_experts": fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"), "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _gemma2(fields: Metadata) -> dict[str, Any]:
    own = _gemma(fields, largest=46, full_every=2, window=4096)
    caps = {"attn_logit_softcapping": SCORE_CAP, "final_logit_softcapping": LOGIT_CAP}
    return own | {name: fields.number(key) for name, key in caps.items() if fields.own(key) is not None}


def _gemma3(fields: Metadata) -> dict[str, Any]:
    cap = fields.number(LOGIT_CAP, 0.0)
    return {
        **_gemma(fields, largest=62, full_every=6),
        "rope_local_base_freq": fields.number(LOCAL_BASE, 10_000.0),
        "final_logit_softcapping": cap or None,
    }


def _gemma(fields: Metadata, largest: int, full_every: int, window: int | None = None) -> dict[str, Any]:
    """Scores are scaled by the size of a head, but in the largest model, known by its layers, by hidden numbers a
    head, which no file says."""
    hidden, heads, head_dim = fields.size("embedding_length"), fields.size("attention.head_count"), _head_dim(fields)
    is_largest = fields.size("block_count") == largest
    return {
        **_windows(fields, full_every, window),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_largest else head_dim,
    }


def _windows(fields: Metadata, full_every: int, window: int | None) -> dict[str, Any]:
    """The window, and which layers have it: a file says so of each, or that every n-th has none; older ones leave that
    to the architecture."""
    count, pattern = fields.size("block_count"), fields.own(PATTERN)
    if not fields.own(WINDOW, window):
        return {"sliding_window": None, "layer_types": [FULL] * count}
    if isinstance(pattern, list):
        if len(pattern) != count or not all(isinstance(slides, bool) for slides in pattern):
            raise fields.fault(fields.prefix + PATTERN, f"must be a list of {count} times true or false, or a number")
        slide = [bool(slides) for slides in pattern]
    else:
        every = fields.size(PATTERN, full_every)
        slide = [(layer + 1) % every != 0 for layer in range(count)]
    return {"sliding_window": fields.size(WINDOW, window), "layer_types": [SLIDING if each else FULL for each in slide]}


def _phi3(fields: Metadata) -> dict[str, Any]:
    return {"sliding_window": fields.size(WINDOW) if fields.own(WINDOW) else None, **_share(fields)}


def _head_dim(fields: Metadata) -> int:
    whole, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    return fields.size("attention.key_length", whole // heads)


def _share(fields: Metadata) -> dict[str, Any]:
    head_dim = _head_dim(fields)
    return {"partial_rotary_factor": fields.size("rope.dimension_count", head_dim) / head_dim}


def _granite(fields: Metadata) -> dict[str, Any]:
    defaults = {"attention.scale": _head_dim(fields) ** -0.5}
    return {name: fields.number(key, defaults.get(key, 1.0)) for key, name in MULTIPLIERS.items()}


def _gpt_oss(fields: Metadata) -> dict[str, Any]:
    size = fields.size("expert_feed_forward_length", fields.size("feed_forward_length"))
    return {
        **_windows(fields, full_every=2, window=None), "intermediate_size": size, "attention_bias": True,
        "num_local_experts": fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count"),
    }  # fmt: skip


def _glm4(fields: Metadata) -> dict[str, Any]:
    names = {tensor.name for tensor in fields.header.tensors}
    return {"attention_bias": "blk.0.attn_q.bias" in names, **_share(fields)}


_OWN: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama, "qwen3moe": _qwen3moe, "gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3, "granite": _granite,
    "glm4": _glm4, "gpt-oss": _gpt_oss,
}  # fmt: skip
"""Fields that an architecture has beside the shared ones, or in their place."""
