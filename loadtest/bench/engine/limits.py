"""What the processor allows: its measured rates, and what a step has to read and multiply at least."""

from __future__ import annotations

import torch

from loadtest.rig.measure import median_s
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig
from shared.model.decoder import Decoder

_BUFFER_BYTES = 512 * 1024 * 1024
_MATRIX_SIZE = 2048


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes a second of a streaming read by all of torch's threads."""
    buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32)
    return _BUFFER_BYTES / median_s(buffer.sum, repeats)


def matmul_rate(repeats: int = 5) -> float:
    """FLOP/s of the best square product, over the dtypes that a bf16 or fp32 model may compute in."""
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(_MATRIX_SIZE, _MATRIX_SIZE).to(dtype)
        rates.append(2 * _MATRIX_SIZE**3 / median_s(lambda a=a: a @ a, repeats))  # type: ignore[misc]
    return max(rates)


def active_parameters(config: ModelConfig) -> int:
    """Of the projections, those that every token is multiplied by: of experts, as many as it chooses."""
    found = config.num_layers * _attention(config) + _head(config)
    num_dense = config.num_layers
    if config.moe is not None:
        num_dense -= config.moe.num_layers
        found += config.moe.num_layers * config.hidden_size * _of_hidden(config.moe)
    return found + num_dense * 3 * config.hidden_size * config.intermediate_size


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Of the projections for every token (the output head's for one), and of causal attention by heads."""
    head = _head(config)
    key_dim, value_dim = (config.head_dim, config.head_dim)
    if config.latent is not None:
        key_dim, value_dim = config.latent.query_dim, config.latent.value_dim
    attention = config.num_layers * config.num_heads * (key_dim + value_dim) * num_tokens**2
    return 2.0 * (active_parameters(config) - head) * num_tokens + 2.0 * head + attention


def weight_bytes(decoder: Decoder, batch: int) -> float:
    """That a step of `batch` tokens reads, as they lie in memory; of experts those that independent tokens choose in
    the mean."""
    if decoder.config.moe is None:
        return decoder.projection_bytes
    routing = decoder.config.moe.routing
    unread = (1 - routing.top_k / routing.num_experts) ** batch
    return decoder.projection_bytes - unread * decoder.expert_bytes


def _attention(config: ModelConfig) -> int:
    """Parameters of a layer's attention."""
    hidden, heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        return hidden * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    query = heads * latent.query_dim
    placed = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
    by_head = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    return placed + hidden * latent.cached_dim + heads * (by_head + latent.value_dim * hidden)


def _of_hidden(moe: MoeConfig) -> int:
    """Parameters of a token's experts in a layer, its router and what all tokens pass, for each of `hidden_size`."""
    return moe.routing.num_experts + 3 * (moe.routing.top_k * moe.expert_size + moe.shared_size)


def _head(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size
