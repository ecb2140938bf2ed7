"""The architectures that GGUF files are read of: how each names its tensors, and what it changes in their numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shared.model.gguf.header import Value

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
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}  # fmt: skip
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
"""{}: of each expert, which lie one behind the other in one tensor."""
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = {**_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """What one `general.architecture` has apart from the others."""

    family: str  # its name in Hugging Face layout
    model_type: str  # likewise
    names: Mapping[str, str] = field(default_factory=dict)  # within a layer, beside the usual ones or in their place
    is_paired: bool = False  # rotated rows of queries and keys lie with their neighbours in pairs, not in halves
    added: float = 0.0  # to the weights of norms
    is_partial: bool = False  # a share of each head may be rotated
    reads: tuple[str, ...] = ()  # of CHANGING


WINDOW, PATTERN, LOCAL_BASE = "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"
SCORE_CAP, LOGIT_CAP, EXPERTS = "attn_logit_softcapping", "final_logit_softcapping", "expert_count"
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
"""Granite's, and their names in Hugging Face layout."""
CHANGING = (
    WINDOW, PATTERN, LOCAL_BASE, SCORE_CAP, LOGIT_CAP, EXPERTS, *MULTIPLIERS, "rope.dimension_sections"
)  # fmt: skip
"""Metadata that change the answer, under an architecture's name: where it does not read them, the file is refused."""
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({
    "llama": Architecture("LlamaForCausalLM", "llama", _MIXTRAL, is_paired=True, reads=(EXPERTS,)),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS, reads=(EXPERTS,)),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _AROUND, added=1.0, reads=(WINDOW, SCORE_CAP, LOGIT_CAP)),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", _AROUND, added=1.0, reads=(WINDOW, PATTERN, LOCAL_BASE, LOGIT_CAP)
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", "phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, is_partial=True,
        reads=(WINDOW,),
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", is_paired=True, reads=tuple(MULTIPLIERS)),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _BEHIND),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", _GLM4, is_partial=True),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS, reads=(WINDOW, EXPERTS)),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", is_paired=True),
})  # fmt: skip
"""By `general.architecture`; llama with experts is Mixtral."""
FREQUENCY_FACTORS = "rope_freqs.weight"
"""The tensor of what frequencies of positions are divided by."""
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""Likewise, of texts up to the trained length and beyond it."""
OF_POSITIONS = (FREQUENCY_FACTORS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors of which `config.json` has the content."""
_PLAIN = Architecture("", "")


def plain_names(architecture: str, name: str, shape: tuple[int, ...]) -> list[str]:
    """A tensor's name in a checkpoint of Hugging Face layout, or those of the experts that lie in it one behind the
    other; of an unknown one its own."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return [f"{_TOP[module]}.{kind}"]
    found = _LAYER.fullmatch(name)
    known = {**_OF_LAYER, **ARCHITECTURES.get(architecture, _PLAIN).names}
    if found is None or found[2] not in known:
        return [name]
    plain = f"model.layers.{found[1]}.{known[found[2]]}.{found[3]}"
    if found[2] == "attn_sinks":
        return [plain.removesuffix(".weight")]
    return [plain.format(expert) for expert in range(shape[0])] if "{}" in plain and len(shape) == 3 else [plain]


def added_to(architecture: str, name: str) -> float:
    """What has been added to each number of a tensor."""
    return ARCHITECTURES.get(architecture, _PLAIN).added if name.endswith("norm.weight") else 0.0


def heads_of(metadata: Mapping[str, Value], name: str) -> int:
    """Heads whose rows lie with neighbours in pairs in a query's or key's projection; 0: they lie in halves."""
    architecture = str(metadata.get("general.architecture"))
    if not ARCHITECTURES.get(architecture, _PLAIN).is_paired:
        return 0
    queries = metadata.get(f"{architecture}.attention.head_count", 0)
    found = queries if ".attn_q." in name else metadata.get(f"{architecture}.attention.head_count_kv", queries)
    is_placed = ".attn_q." in name or ".attn_k." in name
    return found if is_placed and isinstance(found, int) else 0
