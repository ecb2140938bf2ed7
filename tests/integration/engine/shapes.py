"""Small models of any shape within what is supported, and ways to split them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from shared.errors import ConfigError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config.model_config import ModelConfig
from shared.model.ranks.shard import Degrees
from tests.integration.engine.families import OTHERS, YARN

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
MAX_RANKS = 8
SPLITS = [
    Degrees(tensor, pipeline, expert)
    for tensor in range(1, MAX_RANKS + 1)
    for pipeline in range(1, 4)
    for expert in range(1, tensor + 1)
    if 1 < tensor * pipeline <= MAX_RANKS
]


class Shape(NamedTuple):
    """A checkpoint to write."""

    architecture: str
    sizes: dict[str, Any]

    def write(self, folder: Path) -> ModelConfig:
        """What `folder` holds afterwards."""
        return write_random_checkpoint(folder, self.architecture, **self.sizes)


def _any(*values: Any) -> SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def _sizes(draw: DrawFn) -> dict[str, Any]:
    kv_heads = draw(_any(1, 2, 3, 4, 6))
    return {
        "vocab_size": draw(_any(61, 97, 130, 211, 257, 333, 1000)),
        "hidden_size": draw(_any(24, 40, 60, 64, 96, 130)),
        "intermediate_size": draw(_any(17, 32, 48, 77, 101, 160)),
        "num_layers": draw(st.integers(1, 4)),
        "num_heads": kv_heads * draw(_any(1, 2, 3, 5, 7)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(_any(8, 10, 16, 20, 24, 32, 64, 80, 96, 128)),
        "tie": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@st.composite
def _dense(draw: DrawFn) -> Shape:
    architecture = draw(_any("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"))
    sizes, extra = draw(_sizes()), {}
    if architecture == "LlamaForCausalLM":
        extra = {"attention_bias": draw(st.booleans())}
        sizes["rope"] = draw(_any(PLAIN, LLAMA3))
        _widen(sizes)
    if architecture == "MistralForCausalLM":
        extra = {"sliding_window": draw(_any(None, 17, 32, 40))}
    return Shape(architecture, {**sizes, "extra_config": extra})


@st.composite
def _experts(draw: DrawFn) -> Shape:
    num_experts = draw(_any(1, 2, 3, 4, 5, 8))
    chosen = draw(st.integers(1, min(3, num_experts)))
    if draw(st.booleans()):
        extra: dict[str, Any] = {"num_local_experts": num_experts, "num_experts_per_tok": chosen}
        return Shape("MixtralForCausalLM", {**draw(_sizes()), "extra_config": extra})
    extra = {
        "num_experts": num_experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": draw(_any(16, 24, 33, 48)),
        "norm_topk_prob": draw(st.booleans()),
        "mlp_only_layers": draw(_any([], [0])),
        "decoder_sparse_step": draw(_any(1, 2)),
    }
    return Shape("Qwen3MoeForCausalLM", {**draw(_sizes()), "extra_config": extra})


@st.composite
def _latents(draw: DrawFn) -> Shape:
    sizes, heads = draw(_sizes()), draw(_any(1, 2, 3, 4, 5, 6, 8, 12))
    groups, in_group = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    chosen = min(3, groups * in_group)
    extra: dict[str, Any] = {
        "kv_lora_rank": draw(_any(16, 24, 40, 64)),
        "qk_rope_head_dim": draw(_any(8, 16)),
        "qk_nope_head_dim": draw(_any(8, 12, 20)),
        "v_head_dim": draw(_any(8, 16, 20)),
        "q_lora_rank": draw(_any(None, 18, 40)),
        "first_k_dense_replace": draw(st.integers(0, 2)),
        "moe_intermediate_size": draw(_any(16, 33, 48)),
        "n_routed_experts": groups * in_group,
        "num_experts_per_tok": chosen,
        "n_shared_experts": draw(_any(1, 2)),
        "routed_scaling_factor": draw(_any(1.0, 1.5, 2.5)),
        "n_group": groups,
        "topk_group": draw(st.integers(-(-chosen // in_group), groups)),
    }
    sizes |= {"num_heads": heads, "num_kv_heads": heads, "rope": draw(_any(PLAIN, YARN))}
    if draw(st.booleans()):
        _widen(sizes)
        extra |= {"topk_method": draw(_any("greedy", "group_limited_greedy")), "norm_topk_prob": False}
        return Shape("DeepseekV2ForCausalLM", {**sizes, "extra_config": extra})
    extra |= {"norm_topk_prob": draw(st.booleans()), "num_nextn_predict_layers": 0}
    return Shape("DeepseekV3ForCausalLM", {**sizes, "extra_config": extra})


@st.composite
def _others(draw: DrawFn) -> Shape:
    """Windows in turns, norms around a layer's parts, sinks, heads rotated in part, multipliers."""
    name = draw(_any(*OTHERS))
    architecture, own = OTHERS[name]
    sizes, extra = draw(_sizes()), dict(own)
    _widen(sizes)
    layers = sizes["num_layers"]
    if "layer_types" in extra:
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        extra["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
        extra["sliding_window"] = draw(_any(2, 3, 16, 17, 40))  # transformers keeps too much of a window of one
    if name == "llama4":
        extra |= {"attention_chunk_size": draw(_any(2, 3, 16, 17, 40)), "use_qk_norm": draw(st.booleans())}
    if name == "cohere2":  # the fields say no size of a head
        sizes["hidden_size"] = sizes["num_heads"] * sizes["head_dim"]
    if name in ("gpt-oss", "llama4"):
        num_experts = draw(_any(1, 2, 3, 5))
        extra |= {"num_local_experts": num_experts, "num_experts_per_tok": draw(st.integers(1, min(2, num_experts)))}
    if name == "glm4-moe":
        extra |= {"first_k_dense_replace": draw(st.integers(0, layers)), "use_qk_norm": draw(st.booleans())}
    if name.startswith(("glm4", "phi3")):
        sizes["head_dim"] = draw(_any(8, 16, 32, 64))
    if name == "phi3":
        del extra["rope_parameters"]
    return Shape(architecture, {**sizes, "extra_config": extra})


@st.composite
def _states(draw: DrawFn) -> Shape:
    """Layers with a state in turns with gated attention, dense and with experts."""
    architecture = draw(_any("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"))
    sizes, key_heads = draw(_sizes()), draw(_any(1, 2, 3, 5))
    sizes |= {"num_layers": draw(_any(2, 3, 4)), "head_dim": draw(_any(8, 16, 32))}
    kinds = ["linear_attention", "full_attention"]
    kinds += draw(st.lists(_any(*kinds), min_size=sizes["num_layers"] - 2, max_size=sizes["num_layers"] - 2))
    num_experts = draw(_any(1, 2, 3, 5))
    extra: dict[str, Any] = {
        "layer_types": draw(st.permutations(kinds)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(_any(1, 2, 3)),
        "linear_key_head_dim": draw(_any(4, 5, 8, 16, 33)),
        "linear_value_head_dim": draw(_any(4, 7, 16, 40)),
        "linear_conv_kernel_dim": draw(_any(1, 2, 4)),
        "partial_rotary_factor": draw(_any(0.25, 0.5, 1.0)),
        "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, min(2, num_experts))),
        "moe_intermediate_size": draw(_any(16, 33, 48)),
        "shared_expert_intermediate_size": draw(_any(16, 40)),
    }
    return Shape(architecture, {**sizes, "extra_config": extra})


@st.composite
def _channels(draw: DrawFn) -> Shape:
    """Layers with a state that fades by channel in turns with latent attention, dense and with experts."""
    sizes, heads, layers = draw(_sizes()), draw(_any(1, 2, 3, 4, 8)), draw(_any(2, 3, 4))
    kinds, parts, num_experts = ["linear_attention", "full_attention"], ["dense", "sparse"], draw(_any(2, 3, 6))
    kinds += draw(st.lists(_any(*kinds), min_size=layers - 2, max_size=layers - 2))
    extra: dict[str, Any] = {
        "layer_types": draw(st.permutations(kinds)),
        "mlp_layer_types": draw(st.lists(_any(*parts), min_size=layers, max_size=layers)),
        "linear_num_heads": draw(_any(1, 2, 3, 4, 8)),
        "linear_head_dim": draw(_any(4, 5, 8, 16, 32, 48)),
        "linear_conv_kernel_dim": draw(_any(1, 2, 4)),
        "kv_lora_rank": draw(_any(16, 24, 40, 64)),
        "qk_rope_head_dim": draw(_any(8, 16)),
        "qk_nope_head_dim": draw(_any(8, 12, 20)),
        "v_head_dim": draw(_any(8, 16, 20)),
        "q_lora_rank": draw(_any(None, 18, 40)),
        "num_experts": num_experts,
        "num_experts_per_token": draw(st.integers(1, 2)),
        "num_shared_experts": draw(_any(1, 2)),
        "moe_intermediate_size": draw(_any(16, 33, 48)),
        "moe_renormalize": draw(st.booleans()),
        "routed_scaling_factor": draw(_any(1.0, 2.5)),
    }
    # transformers ties no embeddings of this family.
    sizes |= {"num_layers": layers, "num_heads": heads, "num_kv_heads": heads, "tie": False}
    return Shape("KimiLinearForCausalLM", {**sizes, "extra_config": extra})


def _widen(sizes: dict[str, Any]) -> None:
    """transformers takes these families only where heads divide the hidden size, though no weight has that size."""
    sizes["hidden_size"] = -(-sizes["hidden_size"] // sizes["num_heads"]) * sizes["num_heads"]


def shapes() -> SearchStrategy[Shape]:
    """Dense models, models with experts, models with latents, models with states, and the other families."""
    return st.one_of(_dense(), _experts(), _latents(), _states(), _channels(), _others())


def splits(config: ModelConfig, num: int) -> SearchStrategy[list[Degrees]]:
    """As many of a model's own ways to be split over ranks, if it has as many; whole, if it has none."""
    able = [degrees for degrees in SPLITS if can_split(degrees, config)]
    return st.permutations(able).map(lambda mixed: mixed[:num])


def prompts(config: ModelConfig) -> SearchStrategy[list[int]]:
    """Of one token, of whole blocks, of more than a step takes."""
    step, length = st.integers(1, 1000), _any(1, 5, 16, 17, 33, 53, 80)
    return st.builds(lambda step, length: [1 + step * i % (config.vocab_size - 1) for i in range(length)], step, length)


def can_split(degrees: Degrees, config: ModelConfig, *, own_pools: bool = False) -> bool:
    """Whether a worker would take this model and these degrees."""
    try:
        degrees.check(config, own_pools=own_pools)
    except ConfigError:
        return False
    return True
