"""The decoder's parameter tensors, and their mapping to the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.model.config import ModelConfig


@dataclass(frozen=True)
class LayerParameters:
    """One layer. Projections that read the same input are fused into one, in the order of their names."""

    input_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qkv_bias: Tensor | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden_size, num_heads * head_dim]
    o_bias: Tensor | None  # [hidden_size]
    post_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    gate_up_bias: Tensor | None  # [2 * intermediate_size]
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None  # [hidden_size]


@dataclass(frozen=True)
class DecoderParameters:
    """All parameters of a decoder; `lm_head` is `embedding` itself if the two are tied."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerParameters, ...]
    norm: Tensor  # [hidden_size]
    lm_head: Tensor  # [vocab_size, hidden_size]

    @classmethod
    def allocate(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> DecoderParameters:
        """Uninitialised tensors of the right shapes (on `device="meta"`, only the shapes)."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        embedding = empty(config.vocab_size, config.hidden_size)
        return cls(
            embedding=embedding,
            layers=tuple(_allocate_layer(config, dtype, device) for _ in range(config.num_layers)),
            norm=empty(config.hidden_size),
            lm_head=embedding if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size),
        )

    def checkpoint_views(self, config: ModelConfig) -> dict[str, Tensor]:
        """Checkpoint tensor name → the view of these parameters that it fills.

        The views are disjoint and cover all parameters; a tied `lm_head.weight` is left out.
        """
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            views |= {prefix + name: view for name, view in _layer_views(config, layer).items()}
        return views


def _allocate_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> LayerParameters:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return LayerParameters(
        input_norm=empty(hidden),
        qkv=empty(qkv_size, hidden),
        qkv_bias=empty(qkv_size) if config.qkv_bias else None,
        q_norm=empty(head_dim) if config.qk_norm else None,
        k_norm=empty(head_dim) if config.qk_norm else None,
        o=empty(hidden, config.num_heads * head_dim),
        o_bias=empty(hidden) if config.o_bias else None,
        post_norm=empty(hidden),
        gate_up=empty(2 * inner, hidden),
        gate_up_bias=empty(2 * inner) if config.mlp_bias else None,
        down=empty(hidden, inner),
        down_bias=empty(hidden) if config.mlp_bias else None,
    )


def _layer_views(config: ModelConfig, layer: LayerParameters) -> dict[str, Tensor]:
    views: dict[str, Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.o,
        "self_attn.o_proj.bias": layer.o_bias,
        "post_attention_layernorm.weight": layer.post_norm,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }

    def split(fused: Tensor | None, kind: str, rows: dict[str, int]) -> None:
        if fused is not None:
            parts = torch.split(fused, list(rows.values()))
            views.update({f"{name}.{kind}": part for name, part in zip(rows, parts, strict=True)})

    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_rows = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    gate_up_rows = {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}
    split(layer.qkv, "weight", qkv_rows)
    split(layer.qkv_bias, "bias", qkv_rows)
    split(layer.gate_up, "weight", gate_up_rows)
    split(layer.gate_up_bias, "bias", gate_up_rows)
    return {name: view for name, view in views.items() if view is not None}
