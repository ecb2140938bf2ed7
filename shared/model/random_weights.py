"""Random weights with realistic statistics, for tests and benchmarks that need no trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shared.kernels.backends.registry import AUTO, choose_kernels
from shared.model.config.model_config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.layers.parameters import DecoderParameters

_BEHIND = 3.0  # of norms of what a layer's parts give
_LOGIT_STD = 4.0  # large enough that rounding does not change the greedy choice


def mean_and_std(name: str, shape: Sequence[int], config: ModelConfig) -> tuple[float, float]:
    """Mean and standard deviation for one tensor of a checkpoint.

    Scaled so that the context determines the next token: layers outweigh the embedding, attention is sharp, logits come
    out with a standard deviation of about four.
    """
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 2.0 - config.norm_offset, 0.1
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.1
    if name.endswith("norm.weight"):
        is_behind = name.split(".")[-2] in (config.names.attention_norm, config.names.output_norm)
        return (_BEHIND if is_behind else 1.0) - config.norm_offset, 0.1
    if name.endswith((".bias", "_bias")):
        return 0.0, 0.1
    if name.endswith(".sinks"):
        return 1.0, 1.0
    if name == "lm_head.weight" or (name == "model.embed_tokens.weight" and config.tie_word_embeddings):
        return 0.0, _LOGIT_STD / math.sqrt(config.hidden_size) / config.logit_scale
    if name == "model.embed_tokens.weight":
        return 0.0, 1.0
    blocks_out = ("o_proj.weight", "down_proj.weight", "w2.weight", ".down_proj")
    attention_in = (
        "q_proj.weight",
        "k_proj.weight",
        "qkv_proj.weight",
        "q_b_proj.weight",
        "gate.weight",
        "router.weight",
    )
    gain = 3.0 if name.endswith(blocks_out) else 2.0 if name.endswith(attention_in) else 1.0
    return 0.0, gain / math.sqrt(shape[1])


def random_decoder(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0, kernels: str = AUTO
) -> Decoder:
    """A decoder whose weights are generated on its device: 8B parameters in a second on a GPU, without a file.

    Raises ConfigError if the kernels cannot serve this device or dtype.
    """
    chosen = choose_kernels(device, dtype, kernels)
    parameters = DecoderParameters.allocate(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in parameters.checkpoint_views(config).items():
        mean, std = mean_and_std(name, view.shape, config)
        assert isinstance(view, torch.Tensor)
        view.normal_(mean, std, generator=generator)
    return Decoder(config, parameters, chosen)
