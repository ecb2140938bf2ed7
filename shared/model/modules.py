"""The decoder's modules: the norms' weights, and the projections as the backend's linear layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.backend import DecoderOps, Linear
from shared.model.parameters import DecoderParameters, LayerParameters


@dataclass(frozen=True)
class LayerModules:
    """One layer. Projections that read the same input are one linear layer."""

    input_norm: Tensor  # [hidden_size]
    qkv: Linear  # hidden_size to (num_heads + 2 * num_kv_heads) * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Linear  # num_heads * head_dim to hidden_size
    post_norm: Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size to 2 * intermediate_size
    down: Linear  # intermediate_size to hidden_size


@dataclass(frozen=True)
class DecoderModules:
    """A whole decoder."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerModules, ...]
    norm: Tensor  # [hidden_size]
    lm_head: Linear  # hidden_size to vocab_size

    @classmethod
    def build(cls, parameters: DecoderParameters, ops: DecoderOps) -> DecoderModules:
        """Takes ownership of the parameters: a backend may lay projections out anew in their memory.

        A tied embedding does not change; the output projection is built separately.
        """
        is_tied = parameters.lm_head is parameters.embedding
        return cls(
            embedding=parameters.embedding,
            layers=tuple(_build_layer(layer, ops) for layer in parameters.layers),
            norm=parameters.norm,
            lm_head=ops.make_linear(parameters.lm_head, None, own=not is_tied),
        )

    @property
    def projection_bytes(self) -> int:
        """Bytes of all projections' weights: those that a step of one token reads."""
        layers = (linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return sum(linear.nbytes for linear in (*layers, self.lm_head))


def _build_layer(layer: LayerParameters, ops: DecoderOps) -> LayerModules:
    return LayerModules(
        input_norm=layer.input_norm,
        qkv=ops.make_linear(layer.qkv, layer.qkv_bias, own=True),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=ops.make_linear(layer.o, layer.o_bias, own=True),
        post_norm=layer.post_norm,
        gate_up=ops.make_linear(layer.gate_up, layer.gate_up_bias, own=True),
        down=ops.make_linear(layer.down, layer.down_bias, own=True),
    )
