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
from shared.model.layers.modules import LayerModules, project


class DeltaBlock:
    """Linear attention by the gated delta rule, in place of an attention block."""

    def __init__(
        self, config: ModelConfig, layer: LayerModules, kernels: DecoderOps, place: tuple[int, int], index: int
    ) -> None:
        """Keeps references to its arguments; `place` is one of `layer_places`, `index` the layer's number, from 0."""
        assert config.delta is not None
        assert layer.delta is not None
        modules, delta = layer.delta, config.delta
        self._kernels = kernels
        self._index = index
        self._layer = layer
        self._modules = modules
        self._delta = DeltaLayer(
            delta.num_key_heads,
            delta.num_value_heads,
            delta.key_dim,
            delta.value_dim,
            delta.kernel_size,
            delta.is_by_channel,
            modules.conv,
            modules.decay,
            modules.decay_bias,
            modules.norm,
            config.rms_norm_eps,
            number=place[1],
            num_parts=config.num_state_parts,
            places=delta.places,
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A token's shape of what `attend` reads, and of what it gives."""
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
        `DecoderOps.delta_attention` takes them. The other arguments as for `AttentionBlock.place`."""
        parts = [self._layer.qkv.forward(x), *self._narrow(x)]
        with in_this_thread(x, parts[0].numel()):
            projected = torch.cat(parts, -1)
        if loras is not None:
            loras.add(projected, x, self._index, "qkv")
        return projected

    def _narrow(self, x: Tensor) -> tuple[Tensor, ...]:
        """What follows the projections of `qkv`: rates and decays, and before them gates of lower rank."""
        modules, narrow = self._modules, self._modules.rates.forward(x)
        if modules.decays is None or modules.gates is None:
            return (narrow,)
        rates, decays, gates = torch.split(
            narrow, [self._delta.num_value_heads, modules.decays.in_size, modules.gates.in_size], -1
        )
        return modules.gates.forward(gates.contiguous()), rates, modules.decays.forward(decays.contiguous())

    def attend(self, query: Tensor, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """What `place` gave to [num_tokens, value_size], gated and normed. Reads and writes the sequences' states."""
        return self._kernels.delta_attention(query, self._delta, pool, batch)

    def project(self, attended: Tensor, loras: Loras | None = None) -> Tensor:
        """[num_tokens, value_size] to [num_tokens, hidden_size]."""
        return project(self._layer.o, attended, loras, self._index, "o")
