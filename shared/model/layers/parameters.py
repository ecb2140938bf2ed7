"""The decoder's parameter tensors, and their mapping to the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import QuantizedWeight, Weight
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig
from shared.model.layers.delta_parameters import DeltaParameters, allocate_delta, delta_views
from shared.model.layers.expert_copies import ExpertCopies
from shared.model.layers.fused_rows import delta_out, delta_rows, gate_up_rows, qkv_rows

BIAS_COLUMNS = 32
"""Columns behind an expert's inputs where experts have biases: the first one holds the bias of gate and up, which the
input 1 there adds, the others keep whole vectors."""

Specs = Mapping[str, LinearSpec]
"""Checkpoint tensor name → form of a projection in fewer bits."""
NO_SPECS: Specs = {}

_OF_IMAGES = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
    "model.visual.", "visual.",
)  # fmt: skip
"""How the names of tensors begin that read images, in a checkpoint whose text part is served."""
_OF_GUESSES = "mtp."
"""How the names of tensors begin in Qwen's layers that predict further than the next token."""


@dataclass(frozen=True)
class LatentParameters:
    """Parameters of the projections from and to the latents of latent attention."""

    q: Weight | None  # [num_heads * query_dim, q_rank], None where queries have no latent
    kv: Tensor  # [num_heads * (nope_dim + value_dim), kv_rank]


@dataclass(frozen=True)
class ExpertParameters:
    """A layer's router, and some of its experts."""

    router: Tensor  # [num_experts, hidden_size], fp32 where the logits are
    router_bias: Tensor | None  # [num_experts] fp32
    gate_up: Weight  # [num_local_experts, 2 * expert_size, in_size], in_size = hidden_size, or BIAS_COLUMNS more
    down: Weight  # [num_local_experts, in_size, expert_size]
    experts: Sequence[int]  # [num_local_experts] their ids, ascending; adjacent ones where `copies` is None
    logit_bias: Tensor | None = None  # [num_experts]
    down_bias: Tensor | None = None  # [num_local_experts, hidden_size]
    copies: ExpertCopies | None = None
    shared_gate: Tensor | None = None  # [1, hidden_size]

    @property
    def first_expert(self) -> int:
        """The id of the first expert as the kernels number them: from 0 where copies of experts are chosen."""
        return self.experts[0] if self.copies is None else 0


@dataclass(frozen=True)
class LayerParameters:
    """One layer. Projections that read the same input are fused into one, in the order of their names.

    With latent attention `qkv` gives the queries or their latents, the latent, and the key of all heads; `q_norm` and
    `k_norm` are the latents'. With a state it gives what `delta_rows` says. Where attention is gated, a head's
    gate lies behind its query. With experts, `gate_up` and `down` are those of the shared ones.
    """

    input_norm: Tensor | None  # [hidden_size], as the three norms below; None: nothing is normalised
    attention_norm: Tensor | None
    post_norm: Tensor | None
    output_norm: Tensor | None
    qkv: Weight  # [qkv_size, hidden_size]: see `qkv_rows`
    qkv_bias: Tensor | None  # [qkv_size]
    q_norm: Tensor | None  # [head_dim], [num_heads * head_dim] or [q_rank]
    k_norm: Tensor | None  # [head_dim], [num_kv_heads * head_dim] or [kv_rank]
    sinks: Tensor | None  # [num_heads]
    latent: LatentParameters | None
    delta: DeltaParameters | None
    o: Weight  # [hidden_size, num_heads * value_dim]; of all values with a state
    o_bias: Tensor | None  # [hidden_size]
    experts: ExpertParameters | None
    gate_up: Weight | None  # [2 * intermediate_size, hidden_size]; None where no token passes it
    gate_up_bias: Tensor | None  # [2 * intermediate_size]
    down: Weight | None  # [hidden_size, intermediate_size]
    down_bias: Tensor | None  # [hidden_size]


@dataclass(frozen=True)
class DecoderParameters:
    """All parameters of a decoder; `lm_head` is `embedding` itself if the two are tied."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerParameters, ...]
    norm: Tensor  # [hidden_size]
    lm_head: Weight  # [vocab_size, hidden_size]
    head_spec: LinearSpec | None = None
    """What a tied output projection is rounded to; None: it is the embedding as it is."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        experts: Sequence[Sequence[int]] | None = None,
        specs: Specs = NO_SPECS,
    ) -> DecoderParameters:
        """Uninitialised tensors of the right shapes (on `device="meta"`, only the shapes).

        `experts`: ids of those to have of each layer, or None for all. `specs`: the forms of projections in fewer bits,
        by their tensors' plain names in a checkpoint. One of fused parts that are not all alike is kept plain, and so
        are the latents' projection, embedding and routers.
        """
        new = Allocator(dtype, device, specs)
        embedding = new.empty(config.vocab_size, config.hidden_size)
        head = {"lm_head": config.vocab_size}
        return cls(
            embedding=embedding,
            layers=tuple(
                allocate_layer(config, index, new, None if experts is None else experts[index])
                for index in range(config.num_layers)
            ),
            norm=new.empty(config.hidden_size),
            lm_head=embedding if config.tie_word_embeddings else new.weight(head, config.hidden_size),
            head_spec=specs.get("lm_head.weight") if config.tie_word_embeddings else None,
        )

    def checkpoint_views(self, config: ModelConfig) -> dict[str, Weight]:
        """Checkpoint tensor name → the view of these parameters that it fills.

        The views are disjoint and cover all parameters but biases that are always zero; a tied `lm_head.weight` is left
        out.
        """
        views: dict[str, Weight] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            views |= {prefix + name: view for name, view in layer_views(config, layer).items()}
        return views


def unused_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of the names of a checkpoint's tensors that these parameters leave out: layers that predict further than
    the next token, and what reads images."""
    layers = range(config.num_layers, config.num_layers + config.num_unused_layers)
    return (*(f"model.layers.{layer}." for layer in layers), *_OF_IMAGES, *((_OF_GUESSES,) if config.delta else ()))


def _dense_name(config: ModelConfig, *, has_experts: bool) -> str:
    """Name of the block that each token passes in a layer: the only one, or the shared experts."""
    return f"{config.moe.prefix}.{config.moe.shared}" if has_experts and config.moe is not None else config.names.mlp


def _norm_sizes(config: ModelConfig) -> tuple[int | None, int | None]:
    """Sizes of `q_norm` and `k_norm`."""
    if config.latent is not None:
        return config.latent.q_rank, config.latent.kv_rank
    match config.qk_norm:
        case "head":
            return config.head_dim, config.head_dim
        case "whole":
            return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return None, None


@dataclass(frozen=True)
class Allocator:
    """Makes tensors of one model, in the forms that projections have."""

    dtype: torch.dtype
    device: torch.device | str
    specs: Specs

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor of plain numbers."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def spec(self, parts: Sequence[Sequence[str]]) -> LinearSpec | None:
        """The form of weights with these parts by name; None: plain numbers, also where parts have several forms."""
        specs = {self.specs.get(f"{name}.weight") for names in parts for name in names}
        return specs.pop() if len(specs) == 1 else None

    def weight(self, rows: Mapping[str, int], in_size: int, ahead: Sequence[Sequence[str]] = ()) -> Weight:
        """A projection of parts by name, `rows` each. `ahead`: of several such weights, each one's names of parts."""
        shape = (*((len(ahead),) if ahead else ()), sum(rows.values()), in_size)
        spec = self.spec(ahead or (tuple(rows),))
        if spec is None:
            return self.empty(*shape)
        return QuantizedWeight.allocate(spec, shape, self.device, part_rows=tuple(rows.values()))


def allocate_layer(
    config: ModelConfig,
    index: int,
    new: Allocator,
    experts: Sequence[int] | None = None,
    prefix: str = "",
    num_read: int = 1,
) -> LayerParameters:
    """One of a config's layers, the `index`-th; `experts` as for `DecoderParameters.allocate`, of this layer. `prefix`:
    what its tensors' names begin with, by default its number's. `num_read`: states that attention reads side by
    side."""
    hidden, prefix = config.hidden_size, prefix or f"model.layers.{index}."
    names, qkv_parts = config.names, qkv_rows(config, index)
    delta = config.delta if config.layers[index].has_state else None
    moe = config.moe if config.has_experts(index) else None
    inner = config.intermediate_size if moe is None else moe.shared_size
    mlp = _dense_name(config, has_experts=moe is not None)

    def weight(rows: Mapping[str, int], in_size: int) -> Weight:
        return new.weight({prefix + name: count for name, count in rows.items()}, in_size)

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else new.empty(hidden)

    sizes = (None, None) if delta is not None else _norm_sizes(config)
    q_norm, k_norm = (None if size is None else new.empty(size) for size in sizes)
    o_name, o_size = ("self_attn.o_proj", config.num_heads * config.value_dim)
    if delta is not None:
        o_name, o_size = delta_out(delta), delta.value_size
    has_bias = config.mlp_bias and inner > 0
    has_qkv_bias, has_o_bias = config.qkv_bias and delta is None, config.o_bias and delta is None
    return LayerParameters(
        input_norm=norm(names.input_norm),
        attention_norm=norm(names.attention_norm),
        post_norm=norm(names.post_norm),
        output_norm=norm(names.output_norm),
        qkv=weight(qkv_parts, num_read * hidden),
        qkv_bias=new.empty(sum(qkv_parts.values())).zero_() if has_qkv_bias else None,  # not every part's is stored
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=new.empty(config.num_heads) if config.has_sinks else None,
        latent=None if delta is not None else _allocate_latent(config, prefix, new),
        delta=None if delta is None else allocate_delta(delta, hidden, new.dtype, new.device),
        o=weight({o_name: hidden}, o_size),
        o_bias=new.empty(hidden) if has_o_bias else None,
        experts=None if moe is None else _allocate_experts(moe, hidden, prefix, new, experts),
        gate_up=weight(gate_up_rows(config, mlp, inner), hidden) if inner else None,
        gate_up_bias=new.empty(2 * inner) if has_bias else None,
        down=weight({f"{mlp}.down_proj": hidden}, inner) if inner else None,
        down_bias=new.empty(hidden) if has_bias else None,
    )


def _allocate_latent(config: ModelConfig, prefix: str, new: Allocator) -> LatentParameters | None:
    latent = config.latent
    if latent is None:
        return None
    heads = config.num_heads
    q_rows = {f"{prefix}self_attn.q_b_proj": heads * latent.query_dim}
    return LatentParameters(
        q=None if latent.q_rank is None else new.weight(q_rows, latent.q_rank),
        kv=new.empty(heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
    )


def _allocate_experts(
    moe: MoeConfig, hidden: int, prefix: str, new: Allocator, experts: Sequence[int] | None
) -> ExpertParameters:
    num_experts = moe.routing.num_experts
    local = range(num_experts) if experts is None else experts
    assert 0 <= local[0] <= local[-1] < num_experts, f"{local} of {num_experts} experts"
    router_dtype = torch.float32 if moe.fp32_router else new.dtype
    in_size = hidden + BIAS_COLUMNS if moe.has_bias else hidden
    gate, up, down = moe.projections
    of_each = [f"{prefix}{moe.prefix}.experts.{expert}" for expert in local]
    rows = {gate: moe.expert_size, up: moe.expert_size}
    gate_up_names = [(f"{name}.{gate}", f"{name}.{up}") for name in of_each]
    down_names = [(f"{name}.{down}",) for name in of_each]
    if new.spec(gate_up_names) is None or new.spec(down_names) is None:  # kernels take both in codes, or neither
        new = replace(new, specs=NO_SPECS)
    gate_up_weight = new.weight(rows, in_size, gate_up_names)
    down_weight = new.weight({down: in_size}, moe.expert_size, down_names)
    if moe.has_bias:
        assert isinstance(gate_up_weight, Tensor), "experts with biases in fewer bits"
        assert isinstance(down_weight, Tensor), "experts with biases in fewer bits"
        gate_up_weight[:, :, hidden + 1 :] = 0
        down_weight[:, hidden:] = 0
    return ExpertParameters(
        router=torch.empty((num_experts, hidden), dtype=router_dtype, device=new.device),
        router_bias=torch.empty(num_experts, dtype=torch.float32, device=new.device) if moe.routing.has_bias else None,
        gate_up=gate_up_weight,
        down=down_weight,
        experts=local,
        logit_bias=torch.empty(num_experts, dtype=router_dtype, device=new.device) if moe.has_bias else None,
        down_bias=new.empty(len(local), hidden) if moe.has_bias else None,
        shared_gate=None if moe.shared_gate is None else new.empty(1, hidden),
    )


def layer_views(config: ModelConfig, layer: LayerParameters) -> dict[str, Weight]:
    """As `DecoderParameters.checkpoint_views`, of one layer, whose names begin behind its number."""
    names, mlp = config.names, _dense_name(config, has_experts=layer.experts is not None)
    q_norm, k_norm = ("q_a_layernorm", "kv_a_layernorm") if layer.latent is not None else ("q_norm", "k_norm")
    delta = config.delta if layer.delta is not None else None
    o_name = "self_attn.o_proj" if delta is None else delta_out(delta)
    views: dict[str, Weight | None] = {
        f"{names.input_norm}.weight": layer.input_norm,
        f"{names.attention_norm}.weight": layer.attention_norm,
        f"{names.post_norm}.weight": layer.post_norm,
        f"{names.output_norm}.weight": layer.output_norm,
        f"self_attn.{q_norm}.weight": layer.q_norm,
        f"self_attn.{k_norm}.weight": layer.k_norm,
        "self_attn.sinks": layer.sinks,
        f"{o_name}.weight": layer.o,
        "self_attn.o_proj.bias": layer.o_bias,
        f"{mlp}.down_proj.weight": layer.down,
        f"{mlp}.down_proj.bias": layer.down_bias,
    }

    def split(fused: Weight | None, kind: str, rows: dict[str, int]) -> None:
        if fused is not None:
            parts = _parts(fused, list(rows.values()))
            views.update({f"{name}.{kind}": part for name, part in zip(rows, parts, strict=True)})

    split(layer.qkv, "weight", qkv_rows(config) if delta is None else delta_rows(delta))
    split(layer.qkv_bias, "bias", qkv_rows(config))
    if layer.gate_up is not None:
        both = gate_up_rows(config, mlp, layer.gate_up.shape[0] // 2)
        split(layer.gate_up, "weight", both)
        split(layer.gate_up_bias, "bias", both)
    if layer.latent is not None:
        views |= {"self_attn.q_b_proj.weight": layer.latent.q, "self_attn.kv_b_proj.weight": layer.latent.kv}
        views.pop("self_attn.q_proj.bias", None)  # zero: no checkpoint has one
    if layer.delta is not None:
        assert delta is not None
        views |= delta_views(delta, layer.delta)
    if layer.experts is not None:
        assert config.moe is not None
        views |= _expert_views(config.moe, layer.experts, config.hidden_size)
    return {name: view for name, view in views.items() if view is not None}


def _expert_views(moe: MoeConfig, experts: ExpertParameters, hidden: int) -> dict[str, Weight | None]:
    gate, up, down = moe.projections
    views: dict[str, Weight | None] = {
        f"{moe.prefix}.{moe.router}.weight": experts.router,
        f"{moe.prefix}.{moe.router}.bias": experts.logit_bias,
        f"{moe.prefix}.{moe.router}.e_score_correction_bias": experts.router_bias,
        f"{moe.prefix}.{moe.shared_gate}.weight": experts.shared_gate,
    }
    if moe.stacked is not None:
        prefix = f"{moe.prefix}.experts"
        assert isinstance(experts.gate_up, Tensor), "stacked experts in fewer bits"
        assert isinstance(experts.down, Tensor), "stacked experts in fewer bits"
        views[f"{prefix}.gate_up_proj"] = experts.gate_up[..., :hidden].transpose(1, 2)
        views[f"{prefix}.down_proj"] = experts.down[:, :hidden].transpose(1, 2)
        if moe.has_bias:
            views[f"{prefix}.gate_up_proj_bias"] = experts.gate_up[..., hidden]
            views[f"{prefix}.down_proj_bias"] = experts.down_bias
        return views
    for place, expert in enumerate(experts.experts):
        prefix = f"{moe.prefix}.experts.{expert}"
        both = _parts(experts.gate_up[place], [moe.expert_size] * 2)
        views[f"{prefix}.{gate}.weight"], views[f"{prefix}.{up}.weight"] = both
        views[f"{prefix}.{down}.weight"] = experts.down[place]
    return views


def _parts(fused: Weight, rows: list[int]) -> Sequence[Weight]:
    """Views of the parts of a fused weight, by their numbers of rows."""
    if isinstance(fused, QuantizedWeight):
        assert fused.part_rows == tuple(rows), f"parts of {fused.part_rows} rows, not {rows}"
        return fused.parts()
    return torch.split(fused, rows)
