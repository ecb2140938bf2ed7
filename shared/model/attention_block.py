"""The attention block of a layer: project, place, remember, attend, project back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.attention import paged_attention
from shared.kernels.batch import AttentionBatch
from shared.kernels.kv_write import write_kv
from shared.kernels.rmsnorm import rms_norm
from shared.kernels.rotary import apply_rotary
from shared.model.config import ModelConfig
from shared.model.parameters import LayerParameters


class AttentionBlock:
    """Grouped-query attention with rotary positions over paged KV, for every supported family."""

    def __init__(self, config: ModelConfig, layer: int, parameters: LayerParameters) -> None:
        """Keeps a reference to the parameters; `layer` counts from 0."""
        self._config = config
        self._layer = layer
        self._parameters = parameters
        self._sizes = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_blocks: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Write this step's K and V into `kv_blocks` and attend.

        Args:
            x: [num_tokens, hidden_size], normalised.
            cos: [num_tokens, head_dim].
            sin: [num_tokens, head_dim].
            kv_blocks: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], changed in place.
            batch: the step's sequences.

        Returns:
            [num_tokens, hidden_size].
        """
        config, weights = self._config, self._parameters
        qkv = functional.linear(x, weights.qkv, weights.qkv_bias)
        query, key, value = (
            part.view(x.shape[0], -1, config.head_dim) for part in torch.split(qkv, self._sizes, dim=-1)
        )  # each [num_tokens, num_heads or num_kv_heads, head_dim]
        if weights.q_norm is not None and weights.k_norm is not None:
            query = rms_norm(query, weights.q_norm, config.rms_norm_eps)
            key = rms_norm(key, weights.k_norm, config.rms_norm_eps)
        query, key = apply_rotary(query, key, cos, sin)
        write_kv(key, value, kv_blocks, self._layer, batch.slots)
        attended = paged_attention(
            query,
            kv_blocks,
            self._layer,
            batch,
            scale=config.head_dim**-0.5,
            window=config.window_of(self._layer),
        )
        return functional.linear(attended, weights.o, weights.o_bias)
