"""What a GGUF file's metadata say of its model, as `config.json` says it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shared.model.config.rope_config import DEFAULT_THETA, RopeConfig
from shared.model.gguf.header import GgufHeader, Value
from shared.model.gguf.metadata import Metadata
from shared.model.layers.rope import inverse_frequencies

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
"""`general.architecture` → its name in Hugging Face layout; llama with experts is Mixtral."""
_EXPERTS = {
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
}  # fmt: skip
"""By architecture, names within a layer; {}: of each expert, which lie one behind the other in one tensor."""
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
FREQUENCY_FACTORS = "rope_freqs.weight"
"""The tensor of what frequencies of positions are divided by."""
_TRAINED, _LOW, _HIGH = 8192, 1.0, 4.0
"""Llama 3's: tokens of its first length, and turns over these below and above which frequencies are scaled and not."""


def plain_names(architecture: str, name: str, shape: tuple[int, ...]) -> list[str]:
    """A tensor's name in a checkpoint of Hugging Face layout, or those of the experts that lie in it one behind the
    other; of an unknown one its own."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return [f"{_TOP[module]}.{kind}"]
    found = _LAYER.fullmatch(name)
    known = _OF_LAYER | _EXPERTS.get(architecture, {})
    if found is None or found[2] not in known:
        return [name]
    plain = f"model.layers.{found[1]}.{known[found[2]]}.{found[3]}"
    return [plain.format(expert) for expert in range(shape[0])] if "{}" in plain and len(shape) == 3 else [plain]


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The content of `config.json`. Raises ModelLoadError (`field`) for what is missing or not served."""
    fields = Metadata(header)
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise fields.fault("general.architecture", f"is {name}, which is not supported in GGUF; supported: {known}")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if window := fields.own("attention.sliding_window"):
        raise fields.fault(fields.prefix + "attention.sliding_window", f"is {window}, which is not supported in GGUF")
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
        **_rope(fields, head_dim),
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
        "rope_theta": fields.number("rope.freq_base", DEFAULT_THETA),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": fields.token("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "torch_dtype": "bfloat16",
        **_experts(fields, name),
    }


def _experts(fields: Metadata, name: str) -> dict[str, Any]:
    if not fields.own("expert_count"):
        return {}
    if name not in _EXPERTS:
        raise fields.fault(fields.prefix + "expert_count", "is not supported in GGUF for this architecture")
    count, chosen = fields.size("expert_count"), fields.size("expert_used_count")
    if name == "llama":
        return {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": count,
            "num_experts_per_tok": chosen,
        }  # fmt: skip
    size = fields.size("expert_feed_forward_length")
    return {
        "model_type": "qwen3_moe", "num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": size,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _rope(fields: Metadata, head_dim: int) -> dict[str, Any]:
    """How positions are scaled, if they are."""
    factors = fields.header.numbers(FREQUENCY_FACTORS)
    kind = fields.own("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise fields.fault(fields.prefix + "rope.scaling.type", f"is {kind} beside {FREQUENCY_FACTORS}")
        return {"rope_scaling": _llama3(fields, head_dim, factors)}
    if kind == "none":
        return {}
    name = fields.prefix + "rope.scaling.type"
    if kind not in ("linear", "yarn"):
        raise fields.fault(name, f"is {kind}, which is not supported in GGUF; supported: none, linear, yarn")
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.fault(fields.prefix + "rope.scaling.attn_factor", "other than 1 is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.size("rope.scaling.original_context_length")
    return {"rope_scaling": scaling}


def _llama3(fields: Metadata, head_dim: int, factors: list[float]) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, of which a file has what it comes to: what each frequency is divided by."""
    if len(factors) != head_dim // 2 or not all(0 < number < math.inf for number in factors):
        raise fields.fault(FREQUENCY_FACTORS, f"must be {head_dim // 2} numbers above 0")
    plain = RopeConfig(theta=fields.number("rope.freq_base", DEFAULT_THETA))
    scaled = replace(
        plain, type="llama3", factor=max(factors), original_max_position_embeddings=_TRAINED,
        low_freq_factor=_LOW, high_freq_factor=_HIGH,
    )  # fmt: skip
    (before, _), (after, _) = (inverse_frequencies(rope, head_dim) for rope in (plain, scaled))
    if not torch.allclose(before / after, torch.tensor(factors), rtol=1e-3, atol=0.0):
        raise fields.fault(FREQUENCY_FACTORS, "are not those of Llama 3, which alone are supported in GGUF")
    return {
        "rope_type": "llama3", "factor": scaled.factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _TRAINED,
    }  # fmt: skip


def heads_of(metadata: Mapping[str, Value], name: str) -> int:
    """Heads whose rows lie with neighbours in pairs in a query's or key's projection; 0: they lie in halves."""
    if metadata.get("general.architecture") != "llama":
        return 0
    queries = metadata.get("llama.attention.head_count", 0)
    found = queries if ".attn_q." in name else metadata.get("llama.attention.head_count_kv", queries)
    is_placed = ".attn_q." in name or ".attn_k." in name
    return found if is_placed and isinstance(found, int) else 0
