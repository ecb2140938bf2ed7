"""A layer that mixes tokens by a state: projections, then `DecoderOps.delta_attention`.

A sequence's states, of all such layers behind each other, lie in a block of each group of states (`KVGroups.is_state`):
a layer's may begin in one and end in another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.delta_layer import DeltaLayer
from shared.kernels.lora.step import Loras
from shared.kernels.pool_view import PoolView
from shared.model.config.model_config import ModelConfig
from shared.model.layers.modules import LayerModules


class DeltaBlock:
    """Linear attention by the gated delta rule, in place of an attention block."""

    def __init__(self, config: ModelConfig, layer: LayerModules, kernels: DecoderOps, place: tuple[int, int]) -> None:
        """Keeps references to its arguments; `place` is one of `layer_places`."""
        assert config.delta is not None
        assert layer.delta is not None
        modules, delta = layer.delta, config.delta
        self._kernels = kernels
        self._layer = layer
        self._rates = modules.rates
        self._delta = DeltaLayer(
            delta.num_key_heads,
            delta.num_value_heads,
            delta.key_dim,
            delta.value_dim,
            delta.kernel_size,
            modules.conv,
            modules.decay,
            modules.decay_bias,
            modules.norm,
            config.rms_norm_eps,
            number=place[1],
            num_parts=config.num_state_parts,
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a token, what `attend` reads and gives."""
        return (self._delta.projected_size,), (self._delta.value_size,)

    def place(
        self,
        x: Tensor,
        cos: Tensor,  # noqa: ARG002  # positions are not encoded
        sin: Tensor,  # noqa: ARG002
        pool: PoolView,  # noqa: ARG002
        slots: Tensor,  # noqa: ARG002
        loras: Loras | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size], normalised, to the projections [num_tokens, projected_size] as
        `DecoderOps.delta_attention` takes them. The other arguments as for `AttentionBlock.place`; adapters add to no
        such layer."""
        assert loras is None, "adapters of layers with a state"
        wide, narrow = self._layer.qkv.forward(x), self._rates.forward(x)
        with in_this_thread(x, wide.numel()):
            return torch.cat((wide, narrow), -1)

    def attend(self, query: Tensor, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """What `place` gave to [num_tokens, value_size], gated and normed. Reads and writes the sequences' states."""
        return self._kernels.delta_attention(query, self._delta, pool, batch)

    def project(self, attended: Tensor, loras: Loras | None = None) -> Tensor:
        """[num_tokens, value_size] to [num_tokens, hidden_size]."""
        assert loras is None, "adapters of layers with a state"
        return self._layer.o.forward(attended)
