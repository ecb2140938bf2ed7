"""What `DecoderOps.delta_attention` knows of a layer, and where its state lies in a pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView


@dataclass(frozen=True, eq=False, slots=True)
class DeltaLayer:
    """A layer that mixes tokens by a state, beside its projections.

    A sequence's state is `state_elements` numbers in fp32: a matrix [key_dim, value_dim] for each value head, then
    the last `kernel_size` - 1 inputs of the convolution, the oldest first. Those of all layers lie behind
    each other, cut into blocks: number i is in the block of group of states i // (block_bytes / 4).
    """

    conv: Tensor  # [kernel_size, mixed_size] fp32, that of the newest token last
    decay: Tensor  # [num_value_heads] fp32, below zero
    decay_bias: Tensor  # [num_value_heads] fp32
    norm: Tensor  # [value_dim] of the model's dtype
    eps: float  # of that norm
    num_key_heads: int  # each serves adjacent value heads, equally many
    key_dim: int
    number: int  # among the layers with a state

    @property
    def num_value_heads(self) -> int:
        """Heads that have a matrix each."""
        return self.decay.shape[0]

    @property
    def value_dim(self) -> int:
        """Of a head."""
        return self.norm.shape[0]

    @property
    def kernel_size(self) -> int:
        """Tokens that the convolution sees."""
        return self.conv.shape[0]

    @property
    def key_size(self) -> int:
        """Elements of a token's keys, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of a token's values, of its gates, and of the result."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return self.conv.shape[1]

    @property
    def projected_size(self) -> int:
        """Columns of what the projections give: queries, keys, values, gates, rates, decays."""
        return self.mixed_size + self.value_size + 2 * self.num_value_heads

    @property
    def matrix_elements(self) -> int:
        """Numbers of all heads' matrices."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_elements(self) -> int:
        """Numbers that the layer keeps of a sequence."""
        return self.matrix_elements + self.mixed_size * (self.kernel_size - 1)


def state_words(pool: PoolView) -> Tensor:
    """[num_blocks, block_bytes / 4] fp32: the pool's memory as states lie in it."""
    return pool.memory.view(pool.num_blocks, -1).view(torch.float32)


def check_delta_attention(projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> None:
    """Assert what `DecoderOps.delta_attention` asks of its arguments."""
    assert projected.shape == (batch.num_tokens, layer.projected_size), f"projected {tuple(projected.shape)}"
    assert projected.stride(1) == 1, "a token's projections are strided"
    assert layer.mixed_size == 2 * layer.key_size + layer.value_size
    assert layer.num_value_heads % layer.num_key_heads == 0
    assert layer.norm.dtype == projected.dtype
    assert layer.decay.shape == layer.decay_bias.shape
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (layer.conv, layer.decay, layer.decay_bias))
    assert pool.memory.is_contiguous(), "states lie in whole blocks"
    states = batch.state_blocks
    assert states is not None, "states lie in KV groups"
    assert states.shape[:2] == (batch.num_seqs, 3)
    assert states.dtype == torch.int32
    assert states.is_contiguous()
    words = state_words(pool).shape[1]
    assert (layer.number + 1) * layer.state_elements <= states.shape[2] * words, "more states than groups hold"
