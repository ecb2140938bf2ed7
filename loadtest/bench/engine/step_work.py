"""What a step takes at least: its operations and the bytes that it reads, by the model, and this processor's rates."""

from __future__ import annotations

from functools import partial

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
        rates.append(2 * _MATRIX_SIZE**3 / median_s(partial(torch.matmul, a, a), repeats))
    return max(rates)


def active_parameters(config: ModelConfig) -> int:
    """Parameters of the projections that a token is multiplied by: of experts, as many as it chooses."""
    num_states = len(config.state_layers)
    found = (config.num_layers - num_states) * _attention(config) + _head(config)
    if config.delta is not None:
        found += num_states * config.delta.num_parameters(config.hidden_size)
    num_dense = config.num_layers
    if config.moe is not None:
        num_dense -= config.num_expert_layers
        found += config.num_expert_layers * config.hidden_size * _of_hidden(config.moe)
    return found + num_dense * 3 * config.hidden_size * config.intermediate_size


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Operations of the projections for every token (the output head's for one), of causal attention by heads to what
    each layer sees, and of what layers with states read of them and write."""
    head = _head(config)
    key_dim, value_dim = (config.head_dim, config.head_dim)
    if config.latent is not None:
        key_dim, value_dim = config.latent.query_dim, config.latent.value_dim
    windows = [min(layer.window or num_tokens, num_tokens) for layer in config.layers if not layer.has_state]
    pairs = sum(window * num_tokens - window**2 / 2 for window in windows)  # of a token with one it sees
    attention = 2.0 * config.num_heads * (key_dim + value_dim) * pairs
    states = 0.0
    if config.delta is not None:  # read for its own value and for what a query asks for, and updated
        sizes = config.delta
        matrix = sizes.num_value_heads * sizes.key_dim * sizes.value_dim
        states = 6.0 * len(config.state_layers) * matrix * num_tokens
    return 2.0 * (active_parameters(config) - head) * num_tokens + 2.0 * head + attention + states


def weight_bytes(decoder: Decoder, batch: int) -> float:
    """Bytes of weights that a step of `batch` tokens reads, as they lie in memory; of experts those that independent
    tokens choose in the mean."""
    if decoder.config.moe is None:
        return decoder.projection_bytes
    routing = decoder.config.moe.routing
    unread = (1 - routing.top_k / routing.num_experts) ** batch
    return decoder.projection_bytes - unread * decoder.expert_bytes


def _attention(config: ModelConfig) -> int:
    """Parameters of a layer's attention."""
    hidden, heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        return hidden * config.head_dim * ((3 if config.is_gated else 2) * heads + 2 * config.num_kv_heads)
    query = heads * latent.query_dim
    placed = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
    by_head = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    return placed + hidden * latent.cached_dim + heads * (by_head + latent.value_dim * hidden)


def _of_hidden(moe: MoeConfig) -> int:
    """Parameters of a token's experts in a layer, its router and what all tokens pass, for each of `hidden_size`."""
    return moe.routing.num_experts + 3 * (moe.routing.top_k * moe.expert_size + moe.shared_size)


def _head(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size
