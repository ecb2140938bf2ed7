"""What `DecoderOps.delta_attention` knows of a layer, and where its state lies in a pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.delta_sizes import DeltaSizes, PartPlaces
from shared.kernels.pool_view import PoolView


@dataclass(frozen=True, eq=False, slots=True)
class DeltaLayer(DeltaSizes):
    """A layer that mixes tokens by a state, beside its projections.

    A sequence's state is `state_elements` numbers in fp32, in `num_parts` parts, each of some adjacent key heads with
    their value heads: their matrices [key_dim, value_dim], then the last `kernel_size` - 1 inputs of their channels of
    the convolution, the oldest first. A part of all layers' states, which lie behind each other, is cut into blocks:
    see `state_words`.
    """

    conv: Tensor  # [kernel_size, mixed_size] fp32, that of the newest token last
    decay: Tensor  # [num_value_heads] fp32, below zero
    decay_bias: Tensor  # [decay_size] fp32
    norm: Tensor  # [value_dim] of the model's dtype
    eps: float  # of that norm
    number: int  # among the layers with a state
    num_parts: int  # a divisor of num_key_heads
    places: PartPlaces | None = (
        None  # of these parts, where they lie in one KV head; None: each has KV heads of its own
    )

    @property
    def part_elements(self) -> int:
        """Numbers of a part of the layer's state."""
        return self.state_elements // self.num_parts


def state_words(pool: PoolView, num_parts: int, places: PartPlaces | None = None) -> Tensor:
    """[num_blocks, num_runs, num_parts, run_words] fp32: the pool's memory as states lie in it, a view.

    Part p lies where the KV of the p-th of `num_parts` equal groups of adjacent KV heads would, run behind run: so a
    rank that has these KV heads has the part, in its own pool and in one that it shares. Number i of a part is in the
    block of group of states i // (num_runs * run_words). `places`: of parts that lie in one KV head, as latents are.
    """
    memory = pool.memory
    if places is not None:
        whole = memory.view(pool.num_blocks, pool.num_layers * pool.num_planes, places.total, -1).view(torch.float32)
        return whole[:, :, places.first : places.first + places.count]
    if num_parts == 1 and memory.is_contiguous():
        return memory.view(pool.num_blocks, 1, 1, -1).view(torch.float32)
    num_runs = pool.num_layers * pool.num_planes
    return memory.view(pool.num_blocks, num_runs, num_parts, -1).view(torch.float32)


def check_delta_attention(projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> None:
    """Assert what `DecoderOps.delta_attention` asks of its arguments."""
    assert projected.shape == (batch.num_tokens, layer.projected_size), f"projected {tuple(projected.shape)}"
    assert projected.stride(1) == 1, "a token's projections are strided"
    assert layer.num_value_heads % layer.num_key_heads == 0
    assert layer.num_key_heads % layer.num_parts == 0
    assert layer.places or pool.num_kv_heads % layer.num_parts == 0, "a KV head's memory has parts of states"
    assert layer.conv.shape == (layer.kernel_size, layer.mixed_size)
    assert layer.decay.shape == (layer.num_value_heads,)
    assert layer.decay_bias.shape == (layer.decay_size,)
    assert not layer.is_by_channel or layer.num_key_heads == layer.num_value_heads, "a decay serves one head"
    assert layer.norm.shape == (layer.value_dim,)
    assert layer.norm.dtype == projected.dtype
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (layer.conv, layer.decay, layer.decay_bias))
    states, count = batch.state_blocks, batch.num_seqs
    if batch.token_states is not None:
        states, count = batch.token_states, batch.num_tokens
    assert states is not None, "states lie in KV groups"
    assert states.shape[:2] == (count, 3)
    assert states.dtype == torch.int32
    assert states.is_contiguous()
    words = state_words(pool, layer.num_parts, layer.places)[0, :, 0].numel()
    assert (layer.number + 1) * layer.part_elements <= states.shape[2] * words, "more states than groups hold"
