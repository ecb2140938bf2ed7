"""What a backend computes: each op's contract, defined once for all of them.

A consumer takes the protocol that it needs; a backend offers all four: `DecoderOps` here, `LoraOps`, `BlockOps` and
`SamplingOps` in modules of their own. Every op asserts the shapes, dtypes and strides given there, and works on the
device of its arguments without waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shared.kernels.activation.activations import SILU, Activation
from shared.kernels.batch import AttentionBatch
from shared.kernels.block_ops import BlockOps
from shared.kernels.delta_layer import DeltaLayer
from shared.kernels.experts.routing_rules import Routing
from shared.kernels.lora.step import ExpertLoras, ExpertParts, LoraOps, StepExpertLoras
from shared.kernels.pool_view import PoolView
from shared.kernels.quantized import QuantizedWeight, Weight
from shared.kernels.sampling_ops import SamplingOps


class Linear(Protocol):
    """`x weight^T + bias`, summed in fp32. It owns its weight, in whatever layout its kind multiplies by.

    Backends make their own kinds, and callers ask none of them which it is; weights in fewer bits are kinds of their
    own. What adapters add is `LoraOps`' part. Calls from several threads at once are safe.
    """

    @property
    def in_size(self) -> int:
        """Columns of x."""
        ...

    @property
    def out_size(self) -> int:
        """Columns of the result."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of x, the bias and the result; the weight may be stored in another."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of the weight as it lies: what one forward pass of few rows reads."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_size], contiguous, to [num_tokens, out_size], both of `dtype`."""
        ...


class BatchedLinear(Protocol):
    """Several `Linear` of one size without bias, each for rows of its own. It owns its weights."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights as they lie."""
        ...

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, num_parts, in_size] to [num_rows, num_parts, out_size], which is `out` where that is given.

        Both may be views of wider tensors, strided but in their last dimension.
        """
        ...


class Experts(Protocol):
    """A layer's experts, or a range of them: `down` of the activated `gate` and `up` of x each.

    It owns their weights.
    """

    @property
    def nbytes(self) -> int:
        """Memory of all weights as they lie; a step reads those of the experts that its tokens chose."""
        ...

    def make_loras(self, parts: Mapping[int, ExpertParts], like: Tensor) -> ExpertLoras:
        """Lays out the additions of one adapter.

        Args:
            parts: by the expert's number among these; gate and up have `a` of [rank, hidden_size] and begin at 0 and
                at intermediate_size, `down` has `a` of [rank, intermediate_size]. Their tensors are copied.
            like: of the model's dtype, on its device.
        """
        ...

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, loras: StepExpertLoras | None = None) -> Tensor:
        """Outputs of each token's experts, times their weights, added up in fp32 in the order of the token's choice.

        Experts out of the range count as zero, so that the results of all ranges add up to the whole. A token's result
        does not depend on its batch mates beyond fp32 rounding.

        Args:
            x: [num_tokens, hidden_size], contiguous, of the weights' dtype.
            expert_ids: [num_tokens, top_k] int64, no two of a token equal.
            weights: [num_tokens, top_k] fp32.
            loras: what adapters add to gate and up, before they are activated, and to what `down` gives; None where no
                token has an addition to this layer's experts.

        Returns:
            [num_tokens, hidden_size], x's dtype.
        """
        ...


class DecoderOps(Protocol):
    """The ops that a decoder is made of."""

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's result does not depend on its batch, nor on how its prompt was cut, to the bit. Experts and
        batched linear layers have no such ops yet."""
        ...

    @property
    def serves_latents(self) -> bool:
        """Whether `paged_attention` takes pools of one plane."""
        ...

    def make_experts(
        self, gate_up: Tensor, down: Tensor, first_expert: int, *, own: bool, activation: Activation = SILU
    ) -> Experts:
        """The experts `first_expert`, `first_expert` + 1, … of a layer.

        Args:
            gate_up: [num_experts, 2 * intermediate_size, hidden_size], gate first, contiguous.
            down: [num_experts, hidden_size, intermediate_size], contiguous.
            first_expert: id of the first of them.
            own: as for `make_linear`.
            activation: between the two.
        """
        ...

    def make_quantized_experts(
        self, gate_up: Weight, down: Weight, first_expert: int, dtype: torch.dtype, activation: Activation = SILU
    ) -> Experts:
        """As `make_experts`, of weights in fewer bits, which the layer keeps; one of both may be plain, of `dtype`."""
        ...

    def choose_experts(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """The experts of each token; a token's choice depends on its own logits alone.

        Args:
            logits: [num_tokens, num_experts], contiguous, the router's: of the model's dtype or fp32.
            bias: [num_experts] fp32, or None where not `has_bias`.
            routing: how to choose; defined in `shared.kernels.experts.routing`.

        Returns:
            (expert_ids [num_tokens, top_k] int64, weights [num_tokens, top_k] fp32), the best first. Two backends may
            differ where a bias, or the sum of a group's best, tells experts apart by no more than rounding.
        """
        ...

    def make_batched_linear(self, weight: Tensor, *, own: bool) -> BatchedLinear:
        """A linear layer for each of weight's [num_parts, out_size, in_size] parts; `own` as for `make_linear`."""
        ...

    def make_linear(self, weight: Tensor, bias: Tensor | None, *, own: bool) -> Linear:
        """A linear layer of the kind that suits this backend, the weight's sizes and the processor.

        Args:
            weight: [out_size, in_size], contiguous.
            bias: [out_size], weight's dtype, or None; the layer keeps it.
            own: the layer may lay the weight out anew in its memory, or free that: it has no other reader afterwards.
                Otherwise it keeps the weight as it is, or a copy.
        """
        ...

    def make_quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """A linear layer of a weight in fewer bits, which it keeps or lays out anew.

        Args:
            weight: [out_size, in_size].
            bias: [out_size] of `dtype`, or None; the layer keeps it.
            dtype: of x and the result. Products are of `scale * (code - zero)`, which only GPUs round to it, for many
                rows.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False) -> Tensor:
        """`weight * (x / rms(x))`, the mean taken in fp32, the quotient rounded to x's dtype before the weight.

        That order of rounding is the one the checkpoints of the Llama family were trained and published with
        (Zhang and Sennrich 2019, arXiv:1910.07467).

        Args:
            x: [..., size].
            weight: [size], x's dtype; None: nothing is normalised.
            eps: added to the mean square.
            is_centered: whether the mean is taken from x first, in fp32: a layer norm without bias.

        Returns:
            [..., size], x's dtype.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's output to the residual stream and normalise the sum.

        Args:
            x: [num_tokens, size], output of a block.
            residual: [num_tokens, size], x's dtype.
            weight: [size], x's dtype; None: nothing is normalised.
            eps: added to the mean square.
            is_centered: as for `rms_norm`.

        Returns:
            (normed, new_residual), both [num_tokens, size]; neither argument is changed.
        """
        ...

    def rotate_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: PoolView,
        layer: int,
        slots: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Place query and key, and remember key and value: what lies between the projection and attention.

        Each head of query and key is normalised where weights are given, then rotated by its token's position
        (RoPE, Su et al. 2021, arXiv:2104.09864): the pairs (i, i + head_dim / 2), as in Hugging Face weights.

        Args:
            query: [num_tokens, num_heads, head_dim]; may be a strided view, as may key and value.
            key: [num_tokens, num_kv_heads, head_dim], query's dtype.
            value: [num_tokens, num_kv_heads, head_dim], query's dtype.
            cos: [num_tokens, head_dim], query's dtype, both halves equal.
            sin: [num_tokens, head_dim], likewise.
            pool: of two planes, changed in place; query's dtype or another that `KV_DTYPES` allows, to which K and V
                are rounded, placed keys first to query's dtype. Only backends of the CPU take a part of a pool.
            layer: 0 <= layer < num_layers.
            slots: [num_tokens] int64, block_id * block_size + offset, no two equal.
            q_norm: [head_dim], weight of the query heads' RMS norm, or None.
            k_norm: [head_dim], likewise for the key heads.
            eps: of those norms.

        Returns:
            [num_tokens, num_heads, head_dim], the query placed, contiguous.
        """
        ...

    def rotate_and_write_latent(
        self,
        query: Tensor,
        latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: PoolView,
        layer: int,
        slots: Tensor,
        *,
        norm: Tensor,
        eps: float,
        is_interleaved: bool,
    ) -> Tensor:
        """`rotate_and_write` for latent attention: rotate the last part of each query, and remember
        each token's normalised latent and the rotated key behind it.

        Rotated pairs come in as (2i, 2i + 1) where `is_interleaved`, and always leave as (i, i + rope_dim / 2).

        Args:
            query: [num_tokens, num_heads, nope_dim + rope_dim]; may be a strided view, as may latent.
            latent: [num_tokens, rank + rope_dim], query's dtype: the latent, and the key of all heads.
            cos: [num_tokens, rope_dim], query's dtype, both halves equal.
            sin: [num_tokens, rope_dim], likewise.
            pool: of one plane with one head of rank + rope_dim, changed in place; otherwise as for `rotate_and_write`.
            layer: 0 <= layer < num_layers.
            slots: [num_tokens] int64, block_id * block_size + offset, no two equal.
            norm: [rank], weight of the latents' RMS norm.
            eps: of that norm.
            is_interleaved: see above.

        Returns:
            [num_tokens, num_heads, nope_dim + rope_dim], contiguous.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        pool: PoolView,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_chunked: bool = False,
    ) -> Tensor:
        """Attend from each token of the step to its own sequence's keys up to itself.

        A query at position p sees the keys j with `p - window < j <= p` (all `j <= p` without a window). Query
        head h reads KV head `h // (num_heads // num_kv_heads)`. A sequence's result does not depend on its
        batch mates beyond fp32 rounding; slots past a sequence's length may hold anything, NaN included.

        Args:
            query: [num_tokens, num_heads, head_dim], contiguous.
            pool: as for `rotate_and_write`, with this step's K and V already written. With one plane in place of two, a
                row is key and value at once, as latents are.
            layer: 0 <= layer < num_layers.
            batch: the step's sequences.
            scale: factor on query · key.
            window: sliding window in tokens, or None.
            softcap: c, by which a score becomes c · tanh(score / c), or None.
            sinks: [num_heads] fp32, contiguous, a score of each head that takes its share of the weights and adds
                nothing (Xiao et al. 2023, arXiv:2309.17453), or None. Neither is there for a pool of one plane.
            is_chunked: whether `window` counts from its multiples: a query at p sees `p - p % window <= j <= p`.

        Returns:
            [num_tokens, num_heads * head_dim], query's dtype.
        """
        ...

    def delta_attention(self, projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """Mix tokens by the sequences' states: short convolution, gated delta rule (Yang et al. 2024,
        arXiv:2412.06464), gated norm; defined in `shared.kernels.delta.reference`.

        Args:
            projected: [num_tokens, projected_size], rows contiguous: queries, keys, values, gates, rates, decays.
            layer: its weights and sizes.
            pool: changed in place: the blocks that `state_blocks` has for what the step writes. States are in fp32.
            batch: the step's sequences, with `state_blocks`, or `token_states`: then tokens are computed one by one.
                One without a block of the state before begins with zeros.

        Returns:
            [num_tokens, value_size], projected's dtype.
        """
        ...

    def act_and_mul(self, gate_up: Tensor, activation: Activation = SILU) -> Tensor:
        """Activates gate and up, the two halves of the last dimension.

        Args:
            gate_up: [num_tokens, 2 * intermediate_size], gate first, contiguous.
            activation: how.

        Returns:
            [num_tokens, intermediate_size], same dtype.
        """
        ...


class Kernels(DecoderOps, LoraOps, BlockOps, SamplingOps, Protocol):
    """A backend whole."""

    @property
    def name(self) -> str:
        """Its name in the registry."""
        ...


@runtime_checkable
class PreparesThreads(Protocol):
    """An addition to a backend that keeps something by thread."""

    def prepare_thread(self, num_heads: int, dtype: torch.dtype, pool: PoolView, max_tokens: int) -> None:
        """Has it made for the calling thread, which will take steps of up to `max_tokens` tokens over `pool`; that is
        read and not written to."""
        ...
