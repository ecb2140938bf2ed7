"""The decoder against transformers: every family and position encoding, however the tokens are split."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.kernels.activation.activations import SILU, Activation
from shared.kernels.batch import AttentionBatch
from shared.kernels.linear import PlainLinear
from shared.kernels.pool_view import PoolView
from shared.kernels.torch_backend import TorchKernels
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.layers.modules import DecoderModules
from shared.model.layers.parameters import DecoderParameters
from tests.unit.model.loading import load_weights

from .paged_run import greedy, load_oracle, oracle_greedy, oracle_logits, prompt_logits

PROMPT = random.Random(1).choices(range(128), k=40)
TOLERANCE = 1.5e-5
"""Of the largest logit: what two orders of fp32 sums leave."""
TOLERANCE_OF_EXPERTS = 1e-4
"""Likewise, where such differences also change how much of which expert a token gets."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "llama-biased": {
        "architecture": "LlamaForCausalLM",
        "tie": True,
        "extra_config": {"attention_bias": True, "mlp_bias": True},
    },
    "mistral-window": {"architecture": "MistralForCausalLM", "extra_config": {"sliding_window": 10}},
    "qwen2-window-upper": {
        "architecture": "Qwen2ForCausalLM",
        "tie": True,
        "extra_config": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "qwen3-biased": {
        "architecture": "Qwen3ForCausalLM",
        "num_kv_heads": 4,
        "extra_config": {"attention_bias": True},
    },
    "qwen3-layer-types": {
        "architecture": "Qwen3ForCausalLM",
        "num_kv_heads": 1,
        "tie": True,
        "extra_config": {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
}
LATENT = {
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
}
FAMILIES |= {
    "mixtral-window": {
        "architecture": "MixtralForCausalLM",
        "extra_config": {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9},
    },
    "qwen3-moe-all-experts": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_layers": 4,
        "extra_config": {
            "num_experts": 7,
            "num_experts_per_tok": 7,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    },
    "qwen3-moe-every-other": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_layers": 4,
        "extra_config": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
        },
    },
    "deepseek-v2-lite": {
        "architecture": "DeepseekV2ForCausalLM",
        "num_heads": 3,
        "num_kv_heads": 3,
        "hidden_size": 36,
        "extra_config": {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    },
    "deepseek-v2-groups": {
        "architecture": "DeepseekV2ForCausalLM",
        "num_kv_heads": 4,
        "extra_config": {
            **LATENT,
            "q_lora_rank": 20,
            "attention_bias": True,
            "n_routed_experts": 9,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    },
    "deepseek-v3": {
        "architecture": "DeepseekV3ForCausalLM",
        "num_kv_heads": 4,
        "num_layers": 3,
        "extra_config": {
            **LATENT,
            "q_lora_rank": 20,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    },
    "deepseek-v3-halves": {
        "architecture": "DeepseekV3ForCausalLM",
        "num_kv_heads": 4,
        "extra_config": {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "num_nextn_predict_layers": 0,
        },
    },
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}},
    "dynamic-below": {"rope": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}},
    "dynamic-crossing": {
        "rope": {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 100.0},
        "max_position_embeddings": 48,  # the prompt lies below, the greedy continuation above
    },
    "dynamic-above": {
        "rope": {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 100.0},
        "max_position_embeddings": 16,
    },
    "llama3": {
        "rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 300.0,
        }
    },
    "yarn": {
        "rope": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 200.0,
        }
    },
    "yarn-mscale": {
        "rope": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 200.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        }
    },
}


def _write(folder: Path, family: str, rope: str, **extra: Any) -> None:
    write_random_checkpoint(folder, **{**FAMILIES[family], **ROPES[rope], **extra})


def _assert_same_logits(folder: Path) -> None:
    expected = oracle_logits(load_oracle(folder), PROMPT)
    decoder = Decoder.load(folder, torch.float32, "cpu")
    assert 2.0 < expected.std() < 8.0
    for chunk_len in (len(PROMPT), 7, 1):
        logits = prompt_logits(decoder, PROMPT, chunk_len)
        assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max(), f"chunks of {chunk_len}"


def _assert_same_greedy(folder: Path) -> int:
    """Returns how many different tokens were chosen."""
    expected_tokens, expected_logits = oracle_greedy(load_oracle(folder), PROMPT, 64)
    tokens, logits = greedy(Decoder.load(folder, torch.float32, "cpu"), PROMPT, 64)
    assert tokens == expected_tokens
    tolerance = TOLERANCE_OF_EXPERTS if load_config(folder).moe is not None else TOLERANCE
    assert (logits - expected_logits).abs().max() < tolerance * expected_logits.abs().max()
    return len(set(tokens))


FAST_PAIRS = [
    *((family, "default") for family in FAMILIES),
    *(("llama", rope) for rope in ROPES if rope != "default"),
    ("mistral-window", "dynamic-above"),
    ("qwen2-window-upper", "yarn"),
    ("qwen3-layer-types", "llama3"),
    ("deepseek-v2-lite", "yarn-mscale"),
    ("deepseek-v3", "yarn-mscale"),
    ("deepseek-v3-halves", "dynamic-crossing"),
]


@pytest.mark.parametrize(("family", "rope"), FAST_PAIRS)
def test_prompt_logits_equal_transformers_in_one_shot_chunks_and_single_tokens(
    tmp_path: Path, family: str, rope: str
) -> None:
    _write(tmp_path, family, rope)
    _assert_same_logits(tmp_path)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama-biased", "llama3"),
        ("mistral-window", "linear"),
        ("qwen2-window-upper", "dynamic-above"),
        ("qwen3-layer-types", "default"),
        ("mixtral-window", "default"),
        ("qwen3-moe-all-experts", "default"),
        ("qwen3-moe-every-other", "default"),
        ("deepseek-v2-groups", "yarn-mscale"),
        ("deepseek-v3", "yarn-mscale"),
    ],
)
def test_a_checkpoint_as_this_release_of_transformers_writes_it_is_the_same_model(
    tmp_path: Path, family: str, rope: str
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    _write(ours, family, rope)
    load_oracle(ours).save_pretrained(theirs)
    expected, written = load_config(ours), load_config(theirs)
    assert [layer.rope and (layer.rope.type, layer.rope.theta) for layer in written.layers] == [
        layer.rope and (layer.rope.type, layer.rope.theta) for layer in expected.layers
    ]
    assert [(layer.window, layer.has_experts) for layer in written.layers] == [
        (layer.window, layer.has_experts) for layer in expected.layers
    ]
    assert (written.moe, written.latent) == (expected.moe, expected.latent)
    _assert_same_logits(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_every_position_encoding_equals_transformers(tmp_path: Path, family: str, rope: str) -> None:
    for seed, tie in ((1, False), (2, True)):
        folder = tmp_path / str(seed)
        _write(folder, family, rope, tie=tie, seed=seed)
        _assert_same_logits(folder)
        _assert_same_greedy(folder)


@pytest.mark.parametrize("rows", [[], [2], [0, 6], list(range(7))])
def test_the_last_feed_forward_block_sees_the_wanted_rows_alone(tmp_path: Path, rows: list[int]) -> None:
    _write(tmp_path, "llama", "default")
    decoder = Decoder.load(tmp_path, torch.float32, "cpu", kernels="torch")
    config = decoder.config
    counting = CountingKernels()
    decoder.kernels = counting
    for mlp in decoder.pieces._mlp:
        mlp._kernels = counting
    pools = [torch.zeros(2, config.num_layers, 2, config.num_kv_heads, 8, config.head_dim) for _ in range(2)]

    def run(rows: list[int], pool: Tensor) -> Tensor:
        batch = AttentionBatch.from_lists([7], [7], [[1]], 8)
        return decoder.forward(
            torch.arange(7) + 5, torch.arange(7), PoolView.over(pool), batch, torch.tensor(rows, dtype=torch.int64)
        )

    expected = run(list(range(7)), pools[0])
    assert counting.num_rows == [7] * config.num_layers
    counting.num_rows.clear()
    logits = run(rows, pools[1])
    assert counting.num_rows == [7] * (config.num_layers - 1) + ([len(rows)] if rows else [])
    assert torch.equal(pools[0], pools[1])
    torch.testing.assert_close(logits, expected[rows], rtol=1e-5, atol=1e-5)


def test_tied_decoder_holds_the_embedding_once(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, tie=True)
    modules = Decoder.load(tmp_path, torch.float32, "cpu", kernels="torch")._modules
    assert isinstance(modules.lm_head, PlainLinear)
    assert modules.lm_head.weight is modules.embedding


def test_packing_leaves_a_tied_embedding_whole(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, tie=True)
    config = load_config(tmp_path)
    parameters = DecoderParameters.allocate(config, torch.float32, "cpu")
    load_weights(tmp_path, parameters.checkpoint_views(config))
    expected = parameters.embedding.clone()
    packed = DecoderModules.build(parameters, ZeroingKernels(), config)
    assert torch.equal(packed.embedding, expected)
    assert isinstance(packed.lm_head, PlainLinear)
    assert not packed.lm_head.weight.any()
    assert packed.layers[-1].down.nbytes == parameters.layers[-1].down.nbytes
    assert not parameters.layers[-1].down.any()


class ZeroingKernels(TorchKernels):
    """Uses up the memory of every weight that it may."""

    def make_linear(self, weight: Tensor, bias: Tensor | None, *, own: bool) -> PlainLinear:
        return PlainLinear((weight if own else weight.clone()).zero_(), bias)


class CountingKernels(TorchKernels):
    """Notes how many rows each feed-forward block gets."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def act_and_mul(self, gate_up: Tensor, activation: Activation = SILU) -> Tensor:  # type: ignore[override]  # static there
        self.num_rows.append(gate_up.shape[0])
        return TorchKernels.act_and_mul(gate_up, activation)
