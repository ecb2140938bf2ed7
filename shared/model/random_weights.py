"""Random weights with realistic statistics, for tests and benchmarks that need no trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from shared.kernels.backends.registry import AUTO, choose_kernels
from shared.kernels.quantized import QuantizedWeight, quantize_rows
from shared.model.config.head_names import numbered_names
from shared.model.config.model_config import HeadConfig, ModelConfig
from shared.model.decoder import Decoder
from shared.model.layers.head import HeadParameters, num_listed
from shared.model.layers.parameters import NO_SPECS, DecoderParameters, Specs
from shared.model.weights.plan import AS_STORED, Quantization, rounding_specs

_BEHIND = 3.0  # of norms of what a layer's parts give
_ROUNDED_ROWS = 2048  # at a time, where weights are rounded
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
    if name.endswith("linear_attn.norm.weight"):
        return 1.0, 0.1
    if name.endswith(".A_log"):
        return -1.0, 1.0
    if name.endswith(("norm.weight", "_norm_embedding.weight", "_norm_hidden.weight")):
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
    blocks_out = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight", ".down_proj")
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


def add_random_head(decoder: Decoder, seed: int = 0) -> None:
    """Gives a decoder on the CPU that has none a head with its last layer's sizes."""
    config = decoder.config
    if config.head is None:
        head = HeadConfig(config.layers[-1], numbered_names(config.num_layers))
        config = replace(config, head=head, num_unused_layers=1)
    parameters = HeadParameters.allocate(config, decoder.dtype, decoder.device)
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for name, view in parameters.checkpoint_views(config).items():
        assert isinstance(view, torch.Tensor), "plain numbers"
        view.normal_(*mean_and_std(name, view.shape, config), generator=generator)
    listed = torch.empty((num_listed(config.vocab_size), config.hidden_size), dtype=decoder.dtype)
    listed.normal_(0.0, _LOGIT_STD / math.sqrt(config.hidden_size) / config.logit_scale, generator=generator)
    decoder.add_head(config, replace(parameters, listed=listed))


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    kernels: str = AUTO,
    quantization: Quantization = AS_STORED,
) -> Decoder:
    """A decoder whose weights are generated on its device: 8B parameters in a second on a GPU, without a file.

    `quantization`: what they are rounded to, some rows at a time. Raises ConfigError if the kernels cannot serve this
    device or dtype.
    """
    chosen = choose_kernels(device, dtype, kernels)
    parameters = DecoderParameters.allocate(config, dtype, device, specs=specs_of(config, quantization))
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in parameters.checkpoint_views(config).items():
        mean, std = mean_and_std(name, view.shape, config)
        if isinstance(view, torch.Tensor):
            view.normal_(mean, std, generator=generator)
        else:
            _fill(view, mean, std, generator)
    return Decoder(config, parameters, chosen)


def specs_of(config: ModelConfig, quantization: Quantization) -> Specs:
    """The forms of a plain model's projections that are rounded."""
    if quantization == "auto":
        return NO_SPECS
    views = DecoderParameters.allocate(config, torch.float32, "meta").checkpoint_views(config)
    return rounding_specs(config, {name: tuple(view.shape) for name, view in views.items()}, quantization)


def _fill(weight: QuantizedWeight, mean: float, std: float, generator: torch.Generator) -> None:
    assert len(weight.shape) == 2, f"random weights of shape {tuple(weight.shape)} are not rounded"
    for first in range(0, weight.out_size, _ROUNDED_ROWS):
        count = min(_ROUNDED_ROWS, weight.out_size - first)
        rows = torch.empty((count, weight.in_size), device=weight.device).normal_(mean, std, generator=generator)
        weight.fill(first, quantize_rows(rows, weight.spec))
