"""A decoder's layers, cut at their attention.

What lies between two attention calls treats every token alike, whatever sequences there are: it depends on the number
of tokens alone, and a row's result on that row alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.layer_stack import LayerInputs
from shared.kernels.lora.step import Loras
from shared.kernels.pool_view import PoolView
from shared.model.config.model_config import ModelConfig
from shared.model.layers.attention_block import AttentionBlock
from shared.model.layers.delta_block import DeltaBlock
from shared.model.layers.latent_attention_block import LatentAttentionBlock
from shared.model.layers.mlp import MixtureOfExperts, feed_forward
from shared.model.layers.modules import DecoderModules, LayerModules


class DecoderPieces:
    """All layers by one call for each op. A step is `first`, then for each layer `attend` and what follows it:
    `between` up to the next layer's attention, or `last`."""

    def __init__(
        self,
        config: ModelConfig,
        modules: DecoderModules,
        kernels: DecoderOps,
        places: Sequence[tuple[int, int]] | None = None,
        first_layer: int = 0,
    ) -> None:
        """Keeps references to its arguments. `places`: of the layers in a pool of more layers than these; None: as
        `config.layer_places`. `first_layer`: the first one's number in blocks of all layers."""
        self._modules = modules
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._is_centered = config.is_centered
        self._is_parallel = config.is_parallel
        self._residual_scale = config.residual_scale
        places = config.layer_places if places is None else places
        self._attention = [
            _attention(config, index, layer, kernels, places[index], first_layer + index)
            for index, layer in enumerate(modules.layers)
        ]
        self._mlp = [feed_forward(layer, index, config, kernels) for index, layer in enumerate(modules.layers)]
        self._drops_rows = True
        self._kept_behind = () if config.head is None else config.head.behind

    @property
    def num_layers(self) -> int:
        """Attention calls of a step."""
        return len(self._attention)

    @property
    def attention_shapes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """For each layer's `attend`, a token's shape of what it reads and of what it gives."""
        return tuple(block.shapes for block in self._attention)

    @property
    def num_chosen(self) -> dict[int, Tensor]:
        """Layer with experts → [num_experts, most copies of one] tokens that chose each since start."""
        blocks = enumerate(self._mlp)
        return {layer: block.num_chosen for layer, block in blocks if isinstance(block, MixtureOfExperts)}

    def over(self, kernels: DecoderOps) -> DecoderPieces:
        """A copy of these layers that computes by other kernels, for all tokens up to the last layer."""
        other = copy.copy(self)
        other._kernels = kernels
        other._drops_rows = False
        return other

    def first(
        self, x: Tensor, cos: Tensor, sin: Tensor, pool: PoolView, slots: Tensor, loras: Loras | None = None
    ) -> Tensor:
        """Up to the first attention: writes the first layer's K and V and returns its query.

        Args:
            x: [num_tokens, hidden_size], the embedded tokens.
            cos: [num_encodings, num_tokens, rotary_dim].
            sin: [num_encodings, num_tokens, rotary_dim].
            pool: changed in place.
            slots: [num_tokens] int64, or of KV groups [num_groups, num_tokens]: `AttentionBatch.group_slots`.
            loras: what adapters add; None where no token has one.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        normed = self._norm(x, self._modules.layers[0].input_norm)
        return self.place(normed, cos, sin, pool, slots, loras)

    def place(
        self, read: Tensor, cos: Tensor, sin: Tensor, pool: PoolView, slots: Tensor, loras: Loras | None = None
    ) -> Tensor:
        """As `first`, of what the first layer's attention reads."""
        return self._attention[0].place(read, cos, sin, pool, slots, loras)

    def attend(self, layer: int, query: Tensor, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """A layer's attention: [num_tokens, num_heads, head_dim] to [num_tokens, num_heads * value_dim]."""
        return self._attention[layer].attend(query, pool, batch)

    def between(
        self,
        layer: int,
        residual: Tensor,
        attended: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: PoolView,
        slots: Tensor,
        loras: Loras | None = None,
    ) -> tuple[Tensor, Tensor]:
        """From a layer's attention up to that of the layer after it, whose K and V it writes.

        Args:
            layer: 0 <= layer < num_layers - 1.
            residual: [num_tokens, hidden_size], the residual stream before this layer's attention.
            attended: [num_tokens, num_heads * value_dim].
            cos: as for `first`, like the rest.
            sin: likewise.
            pool: likewise.
            slots: likewise.
            loras: likewise.

        Returns:
            (query of the next layer [num_tokens, num_heads, head_dim], residual [num_tokens, hidden_size]).
        """
        projected = self._attention[layer].project(attended, loras)
        normed, residual = self._finish(layer, projected, residual, loras)
        return self._attention[layer + 1].place(normed, cos, sin, pool, slots, loras), residual

    def last(self, residual: Tensor, attended: Tensor, logit_rows: Tensor, loras: Loras | None = None) -> Tensor:
        """From the last attention on: [num_logits, hidden_size] of the wanted rows, normed. The last layer's
        feed-forward block is computed for them alone."""
        return self.ends(residual, attended, logit_rows, loras)[0]

    def ends(
        self, residual: Tensor, attended: Tensor, logit_rows: Tensor, loras: Loras | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `last`; and the residual stream behind the last layer, of the same rows."""
        drops_rows = self._drops_rows and logit_rows.shape[0] < attended.shape[0]
        layer = self.num_layers - 1
        projected = self._attention[layer].project(attended, loras)
        if drops_rows:
            loras = None if loras is None else loras.of_kept()
            projected, residual = projected.index_select(0, logit_rows), residual.index_select(0, logit_rows)
            if not logit_rows.shape[0]:
                return projected, residual  # what comes now has an effect on nothing
        normed, residual = self._finish(layer, projected, residual, loras)
        if drops_rows:
            return normed, residual
        with in_this_thread(normed, normed.numel()):
            return normed[logit_rows], residual[logit_rows]

    def run(self, inputs: LayerInputs, logit_rows: Tensor) -> Tensor:
        """As `LayerStack.run`, also for no token."""
        attended, residual = self._to_last_attention(inputs)
        return self.last(residual, attended, logit_rows, inputs.loras)

    def residual(self, inputs: LayerInputs) -> Tensor:
        """[num_tokens, hidden_size] behind the last layer, not normed: what another stage's layers begin with."""
        attended, residual = self._to_last_attention(inputs)
        projected = self._attention[-1].project(attended, inputs.loras)
        return self._finish(self.num_layers - 1, projected, residual, inputs.loras)[1]

    def _to_last_attention(self, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """(what the last layer's attention gives, the residual stream before it)."""
        residual, cos, sin, pool, batch, loras, kept = inputs
        slots = batch.group_slots
        query = self.first(residual, cos, sin, pool, slots, loras)
        for layer in range(self.num_layers - 1):
            attended = self.attend(layer, query, pool, batch)
            query, residual = self.between(layer, residual, attended, cos, sin, pool, slots, loras)
            if kept is not None and layer + 1 in self._kept_behind:
                for place, count in enumerate(self._kept_behind):
                    if count == layer + 1:
                        kept[:, place].copy_(residual)
        return self.attend(self.num_layers - 1, query, pool, batch), residual

    def _finish(self, layer: int, projected: Tensor, residual: Tensor, loras: Loras | None) -> tuple[Tensor, Tensor]:
        """A layer behind its attention block: (what the next layer reads, normed; the residual stream)."""
        layers = self._modules.layers
        next_norm = layers[layer + 1].input_norm if layer + 1 < self.num_layers else self._modules.norm
        own = layers[layer]
        if self._is_parallel:
            normed = self._norm(residual, own.input_norm)  # computed again: a step is cut where attention comes
            _, residual = self._add(projected, own.attention_norm, residual, None)
            return self._add(self._mlp[layer].forward(normed, loras), own.output_norm, residual, next_norm)
        normed, residual = self._add(projected, own.attention_norm, residual, own.post_norm)
        return self._add(self._mlp[layer].forward(normed, loras), own.output_norm, residual, next_norm)

    def _add(self, x: Tensor, norm: Tensor | None, residual: Tensor, next_norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """(what is read next, normed; the residual stream with x, itself normed where there is a `norm`)."""
        if norm is not None:
            x = self._norm(x, norm)
        if self._residual_scale != 1.0:
            with in_this_thread(x, x.numel()):
                x = x * self._residual_scale
        return self._kernels.add_rms_norm(x, residual, next_norm, self._eps, is_centered=self._is_centered)

    def _norm(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return self._kernels.rms_norm(x, norm, self._eps, is_centered=self._is_centered)


def _attention(
    config: ModelConfig, index: int, layer: LayerModules, kernels: DecoderOps, place: tuple[int, int], number: int
) -> AttentionBlock | LatentAttentionBlock | DeltaBlock:
    if config.layers[index].has_state:
        return DeltaBlock(config, layer, kernels, place, index)
    if config.latent is None:
        return AttentionBlock(config, index, layer, kernels, place, number)
    return LatentAttentionBlock(config, layer, kernels, place, number)
