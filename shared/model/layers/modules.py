"""The decoder's modules: the norms' weights, and the projections as the backend's linear layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from shared.collectives.interface import Collectives
from shared.kernels.backend import BatchedLinear, DecoderOps, Experts, Linear
from shared.kernels.lora.step import Loras, Projection
from shared.kernels.quantized import QuantizedWeight, Weight, rounded
from shared.model.config.delta_config import DeltaConfig
from shared.model.config.latent_config import LatentConfig
from shared.model.config.model_config import ModelConfig
from shared.model.layers.delta_parameters import DeltaParameters, part_orders
from shared.model.layers.expert_copies import ExpertCopies
from shared.model.layers.parameters import (
    DecoderParameters,
    ExpertParameters,
    LatentParameters,
    LayerParameters,
)
from shared.model.layers.rope import rotary_order

EXPANDED_HEADS = 8
"""Heads whose keys and values are expanded from latents at once: bounds the memory that a long prompt takes for it."""


@dataclass(frozen=True)
class LatentModules:
    """Projections from and to the latents of latent attention. The keys' projection is there in both directions."""

    q: Linear | None  # q_rank to num_heads * query_dim
    to_latent: BatchedLinear  # of each head, nope_dim to kv_rank: a query as the latents see it
    to_value: BatchedLinear  # of each head, kv_rank to value_dim
    expand: tuple[Linear, ...]  # of EXPANDED_HEADS heads each, kv_rank to heads * (nope_dim + value_dim)


@dataclass(frozen=True)
class DeltaModules:
    """A layer with a state, beside its projections."""

    rates: Linear  # hidden_size to what `rate_rows` says
    conv: Tensor  # [kernel_size, mixed_size] fp32
    decay: Tensor  # [num_value_heads] fp32, below zero
    decay_bias: Tensor  # [decay_size] fp32
    norm: Tensor  # [value_dim]
    decays: Linear | None  # low_rank to decay_size, as the next one; None: `rates` gives them
    gates: Linear | None  # low_rank to value_size; None: `qkv` gives them


@dataclass(frozen=True)
class ExpertModules:
    """A layer's router and experts."""

    router: Linear  # hidden_size to num_experts
    router_bias: Tensor | None  # [num_experts] fp32
    experts: Experts
    down_bias: Tensor | None = (
        None  # [num_local_experts, hidden_size]; experts have biases, and inputs BIAS_COLUMNS more
    )
    first_expert: int = 0  # as `ExpertParameters`
    copies: ExpertCopies | None = None  # None: ids are the router's
    shared_gate: Tensor | None = None  # [1, hidden_size], as `ExpertParameters`
    group: Collectives | None = None  # ranks whose experts' results, the shared ones' among them, are parts of a sum


@dataclass(frozen=True)
class LayerModules:
    """One layer. Projections that read the same input are one linear layer."""

    input_norm: Tensor | None  # [hidden_size], as the three norms below; None: nothing is normalised
    attention_norm: Tensor | None
    post_norm: Tensor | None
    output_norm: Tensor | None
    qkv: Linear  # hidden_size to what `LayerParameters` says
    q_norm: Tensor | None  # as `LayerParameters`
    k_norm: Tensor | None
    sinks: Tensor | None  # [num_heads] fp32
    latent: LatentModules | None
    delta: DeltaModules | None
    o: Linear  # num_heads * value_dim to hidden_size
    experts: ExpertModules | None
    gate_up: Linear | None  # hidden_size to 2 * intermediate_size; None where no token passes it
    down: Linear | None  # intermediate_size to hidden_size
    group: Collectives | None = None  # ranks that have some of the heads each; None: all heads are here

    @property
    def projections(self) -> tuple[Linear | BatchedLinear | Experts, ...]:
        """Projections that a step of one token reads whole; of experts it reads the chosen ones."""
        found: list[Linear | BatchedLinear | Experts | None] = [self.qkv, self.o, self.gate_up, self.down]
        if self.latent is not None:
            found += [self.latent.q, self.latent.to_latent, self.latent.to_value]
        if self.delta is not None:
            found += [self.delta.rates, self.delta.decays, self.delta.gates]
        if self.experts is not None:
            found += [self.experts.router, self.experts.experts]
        return tuple(projection for projection in found if projection is not None)


@dataclass(frozen=True)
class DecoderModules:
    """A whole decoder."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerModules, ...]
    norm: Tensor  # [hidden_size]
    lm_head: Linear  # hidden_size to vocab_size

    @classmethod
    def build(cls, parameters: DecoderParameters, ops: DecoderOps, config: ModelConfig) -> DecoderModules:
        """Takes ownership of the parameters: a backend may lay projections out anew in their memory.

        A tied embedding does not change; the output projection is built separately.
        """
        is_tied = parameters.lm_head is parameters.embedding
        head, dtype = parameters.lm_head, parameters.embedding.dtype
        if parameters.head_spec is not None:
            head = rounded(parameters.embedding, parameters.head_spec)
        return cls(
            embedding=parameters.embedding,
            layers=tuple(
                build_layer(layer, ops, config, dtype, index) for index, layer in enumerate(parameters.layers)
            ),
            norm=offset_norm(parameters.norm, config),
            lm_head=build_linear(ops, head, None, dtype, own=not is_tied),
        )

    @property
    def projection_bytes(self) -> int:
        """Bytes of all projections' weights: those that a step of one token reads, and the experts that it did not
        choose."""
        layers = (projection for layer in self.layers for projection in layer.projections)
        return sum(projection.nbytes for projection in (*layers, self.lm_head))

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts' weights."""
        return sum(layer.experts.experts.nbytes for layer in self.layers if layer.experts is not None)


def build_linear(
    ops: DecoderOps, weight: Weight, bias: Tensor | None, dtype: torch.dtype, *, own: bool = True
) -> Linear:
    if isinstance(weight, QuantizedWeight):
        return ops.make_quantized_linear(weight, bias, dtype)
    return ops.make_linear(weight, bias, own=own)


def build_layer(
    layer: LayerParameters, ops: DecoderOps, config: ModelConfig, dtype: torch.dtype, index: int
) -> LayerModules:
    """One of a config's layers, the `index`-th, from parameters whose ownership it takes."""

    def linear(weight: Weight | None, bias: Tensor | None) -> Linear | None:
        return None if weight is None else build_linear(ops, weight, bias, dtype)

    if layer.delta is not None:
        assert config.delta is not None
        _sort_by_part(layer.qkv, layer.delta.rates, config.delta)
    order = rotary_order(config) if layer.delta is None else None
    q_norm, k_norm = (offset_norm(norm, config) for norm in (layer.q_norm, layer.k_norm))
    if order is not None:
        gates = config.num_heads if config.is_gated else 0
        num_placed = (config.num_heads + gates + config.num_kv_heads) * config.head_dim
        of_weight = layer.qkv.by_row if isinstance(layer.qkv, QuantizedWeight) else [layer.qkv]
        for rows in (*of_weight, layer.qkv_bias):
            if rows is not None:
                by_head = rows[:num_placed].view(-1, config.head_dim, *rows.shape[1:])
                if gates:  # behind each query
                    queries = by_head[: 2 * gates : 2]
                    queries.copy_(queries[:, order])
                    by_head = by_head[2 * gates :]
                by_head.copy_(by_head[:, order])
        q_norm, k_norm = (None if norm is None else norm[order] for norm in (q_norm, k_norm))
    if config.qk_norm == "plain" and config.layers[index].rope is not None:
        q_norm = k_norm = torch.ones(config.head_dim, dtype=dtype, device=layer.qkv.device)
    return LayerModules(
        input_norm=offset_norm(layer.input_norm, config),
        attention_norm=offset_norm(layer.attention_norm, config),
        post_norm=offset_norm(layer.post_norm, config),
        output_norm=offset_norm(layer.output_norm, config),
        qkv=build_linear(ops, layer.qkv, layer.qkv_bias, dtype),
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=None if layer.sinks is None else layer.sinks.float(),
        latent=None
        if layer.latent is None or config.latent is None
        else _build_latent(layer.latent, config.latent, config.num_heads, ops),
        delta=None if layer.delta is None else _build_delta(layer.delta, ops),
        o=build_linear(ops, layer.o, layer.o_bias, dtype),
        experts=None if layer.experts is None else _build_experts(layer.experts, config, ops, dtype),
        gate_up=linear(layer.gate_up, layer.gate_up_bias),
        down=linear(layer.down, layer.down_bias),
    )


def _build_latent(parameters: LatentParameters, latent: LatentConfig, num_heads: int, ops: DecoderOps) -> LatentModules:
    by_head = parameters.kv.view(num_heads, -1, latent.kv_rank)
    keys, values = torch.split(by_head, [latent.nope_dim, latent.value_dim], dim=1)
    parts = torch.split(by_head, EXPANDED_HEADS)
    return LatentModules(
        q=None if parameters.q is None else build_linear(ops, parameters.q, None, parameters.kv.dtype),
        to_latent=ops.make_batched_linear(keys.transpose(1, 2).contiguous(), own=True),
        to_value=ops.make_batched_linear(values.contiguous(), own=True),
        expand=tuple(ops.make_linear(part.flatten(0, 1).clone(), None, own=True) for part in parts),
    )


def _build_delta(parameters: DeltaParameters, ops: DecoderOps) -> DeltaModules:
    decays, gates = (
        None if weight is None else ops.make_linear(weight, None, own=True)
        for weight in (parameters.decays, parameters.gates)
    )
    return DeltaModules(
        rates=ops.make_linear(parameters.rates, None, own=True),
        conv=parameters.conv[:, 0].float().T.contiguous(),
        decay=-parameters.log_decay.exp(),
        decay_bias=parameters.decay_bias,
        norm=parameters.norm,
        decays=decays,
        gates=gates,
    )


def _sort_by_part(qkv: Weight, rates: Tensor, delta: DeltaConfig) -> None:
    """Rows that lie by key head in the order of `part_orders`; in place."""
    if not delta.is_by_head:
        return
    of_qkv, of_rates = part_orders(delta)
    for rows in qkv.by_row if isinstance(qkv, QuantizedWeight) else [qkv]:
        if rows is not None:
            rows.copy_(rows[of_qkv])
    rates.copy_(rates[of_rates])


@overload
def offset_norm(norm: Tensor, config: ModelConfig) -> Tensor: ...
@overload
def offset_norm(norm: None, config: ModelConfig) -> None: ...
def offset_norm(norm: Tensor | None, config: ModelConfig) -> Tensor | None:
    """The weight of a norm as it multiplies."""
    return norm if norm is None or not config.norm_offset else (norm.float() + config.norm_offset).to(norm.dtype)


def _build_experts(
    parameters: ExpertParameters, config: ModelConfig, ops: DecoderOps, dtype: torch.dtype
) -> ExpertModules:
    assert config.moe is not None
    gate_up, down, first, activation = parameters.gate_up, parameters.down, parameters.first_expert, config.activation
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        experts = ops.make_quantized_experts(gate_up, down, first, dtype, activation)
    else:
        if config.moe.stacked == "turns":
            for rows in gate_up:  # of gate and up in turns
                rows.copy_(rows.view(-1, 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape))
        experts = ops.make_experts(gate_up, down, first, own=True, activation=activation)
    return ExpertModules(
        router=ops.make_linear(parameters.router, parameters.logit_bias, own=True),
        router_bias=parameters.router_bias,
        experts=experts,
        down_bias=parameters.down_bias,
        first_expert=first,
        copies=parameters.copies,
        shared_gate=parameters.shared_gate,
    )


class SummedLinear:
    """See `Linear`; every rank calls `forward` with its columns of x, and gets the whole result."""

    def __init__(self, part: Linear, group: Collectives) -> None:
        """Keeps references to its arguments; one rank's part has the bias."""
        self.part = part
        self.in_size, self.out_size, self.dtype, self.nbytes = part.in_size, part.out_size, part.dtype, part.nbytes
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.sum_up(self.part.forward(x))

    def sum_up(self, out: Tensor) -> Tensor:
        """The sum of what the ranks' parts gave, in place."""
        self._group.all_reduce(out)
        return out


def project(linear: Linear, x: Tensor, loras: Loras | None, layer: int, projection: Projection) -> Tensor:
    """What a projection gives, with what adapters add to it. Over ranks these are parts of the same sum."""
    if loras is None:
        return linear.forward(x)
    if not isinstance(linear, SummedLinear):
        out = linear.forward(x)
        loras.add(out, x, layer, projection)
        return out
    out = linear.part.forward(x)
    loras.add(out, x, layer, projection)
    return linear.sum_up(out)


def add_up(modules: DecoderModules, group: Collectives) -> DecoderModules:
    """The same modules with sums over the ranks: of the projections back to the residual stream, and once
    what experts give."""
    return replace(modules, layers=tuple(_summed(layer, group) for layer in modules.layers))


def _summed(layer: LayerModules, group: Collectives) -> LayerModules:
    layer = replace(layer, o=SummedLinear(layer.o, group), group=group)
    if layer.experts is not None:  # `down`, if there is one, is the shared experts': a part of the same sum
        return replace(layer, experts=replace(layer.experts, group=group))
    assert layer.down is not None, "a layer without a feed-forward block"
    return replace(layer, down=SummedLinear(layer.down, group))
