"""A head: one layer more, which guesses the token after the next one. One of a model's own checkpoint (multi-token
prediction, DeepSeek-AI 2024, arXiv:2412.19437, section 2.2), or of a folder apart (EAGLE-3, Li et al. 2025,
arXiv:2503.01840, section 3.1).

At position i it reads the model's state there and token i + 1. So its KV at a position is known once the token behind
that is. `HeadConfig` says which state, and what else differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.backend import DecoderOps
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.linear_spec import int4_spec
from shared.kernels.opened import OpenedLinear
from shared.kernels.pool_view import PoolView
from shared.kernels.quantized import QuantizedWeight, Weight, rounded
from shared.kv.groups import KVGroups
from shared.model.config.model_config import ModelConfig
from shared.model.layers.modules import DecoderModules, build_layer, build_linear, offset_norm
from shared.model.layers.parameters import (
    NO_SPECS,
    Allocator,
    DecoderParameters,
    LayerParameters,
    Specs,
    allocate_layer,
    layer_views,
)
from shared.model.layers.pieces import DecoderPieces
from shared.model.layers.rope import Rotary
from shared.model.layers.scales import scaled_embedding, scaled_logits

LISTED_SHARE, LEAST_LISTED = 0.5, 1024
"""Share of a vocabulary, its first tokens, among which guesses are chosen, and the fewest of them: the ids of byte-pair
vocabularies are in the order of their merges, the most frequent ones first."""
LEAST_ROUNDED = 1 << 16
"""Numbers of a weight that is rounded: smaller ones are read in no time."""
_ROWS = 32
"""What the number of listed tokens is a multiple of, as kernels take rows."""


def num_listed(vocab_size: int) -> int:
    """Tokens that guesses are chosen among."""
    return min(vocab_size, max(LEAST_LISTED, math.ceil(LISTED_SHARE * vocab_size / _ROWS) * _ROWS))


def listed_rows(parameters: DecoderParameters, vocab_size: int) -> Weight | None:
    """The output projection's rows of listed tokens: on a CPU, where kernels lay memory out anew, a copy. None where
    its form cannot be cut."""
    weight, count = parameters.lm_head, num_listed(vocab_size)
    if isinstance(weight, Tensor):
        return weight[:count].clone() if weight.device.type == "cpu" else weight[:count]
    if weight.index is not None or weight.codes.device.type != "cpu":
        return None
    rows = weight.rows(0, count)
    zeros = None if rows.zeros is None else rows.zeros.clone()
    return replace(rows, codes=rows.codes.clone(), scales=rows.scales.clone(), zeros=zeros)


@dataclass(frozen=True)
class HeadParameters:
    """A head's parameters; `num_joined`: states that its projection joins, the token's among them where it is not read
    by attention."""

    embedding_norm: Tensor  # [hidden_size], of the embedded token; of a head apart, that of its layer's input
    hidden_norm: Tensor  # [hidden_size], of the hidden state
    projection: Weight  # [hidden_size, num_joined * hidden_size], of the token, then the hidden state; or of all states
    layer: LayerParameters
    norm: Tensor  # [hidden_size], of what it gives
    listed: Weight | None = (
        None  # [num_listed, hidden_size], of `listed_rows` or its own; None: the whole output projection is used
    )
    tokens: Tensor | None = None  # [num_listed] int64, which these are; None: the first ones
    embedding: Tensor | None = None  # [vocab_size, hidden_size]; None: the model's

    @classmethod
    def allocate(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, specs: Specs = NO_SPECS
    ) -> HeadParameters:
        """Uninitialised; arguments as of `DecoderParameters.allocate`."""
        assert config.head is not None, "a model without a head"
        new, size, head, names = Allocator(dtype, device, specs), config.hidden_size, config.head, config.head.names
        if head.own is None:
            layer = allocate_layer(config.with_head(), config.num_layers, new, prefix=names.prefix + names.layer)
        else:
            layer = allocate_layer(head.own, 0, new, prefix=names.layer, num_read=2)
        own_norm = layer.input_norm if head.is_apart else new.empty(size)
        assert own_norm is not None, "a layer without a norm before it"
        return cls(
            embedding_norm=own_norm,
            hidden_norm=new.empty(size),
            projection=new.weight({names.prefix + names.projection: size}, (len(head.behind) or 2) * size),
            layer=layer,
            norm=new.empty(size),
            listed=new.empty(head.num_guessable, size) if head.is_apart else None,
        )

    def checkpoint_views(self, config: ModelConfig) -> dict[str, Weight]:
        """As `DecoderParameters.checkpoint_views`."""
        assert config.head is not None, "a model without a head"
        head, names = config.head, config.head.names
        of_layer = layer_views(head.own or config.with_head(), self.layer)
        own: dict[str, Weight] = {names.layer + name: view for name, view in of_layer.items()}
        own |= {
            f"{names.embedding_norm}.weight": self.embedding_norm,
            f"{names.hidden_norm}.weight": self.hidden_norm,
            f"{names.projection}.weight": self.projection,
            f"{names.norm}.weight": self.norm,
        }
        if head.is_apart:
            assert self.listed is not None
            own[f"{names.output}.weight"] = self.listed
        if self.embedding is not None:
            own[f"{names.embedding}.weight"] = self.embedding
        return {names.prefix + name: view for name, view in own.items()}


class Head:
    """Computes a head. Keeps no state between calls; its KV is the layer behind the model's in the same blocks."""

    def __init__(
        self, config: ModelConfig, parameters: HeadParameters, of_model: DecoderModules, kernels: DecoderOps
    ) -> None:
        """Takes ownership of the parameters; `of_model`: what it shares with the model."""
        assert config.head is not None, "a model without a head"
        self._config = single = config.head.own or replace(config, layers=(config.head.layer,), head=None)
        self._vocab_size = config.vocab_size
        self.behind = config.head.behind
        """How many of the model's first layers gave each state that it joins; none: it reads the last one, normed."""
        self._kernels = kernels
        self._embedding = of_model.embedding if parameters.embedding is None else parameters.embedding
        dtype = of_model.embedding.dtype
        self._embedding_norm = offset_norm(parameters.embedding_norm, single)
        self._hidden_norm = offset_norm(parameters.hidden_norm, single)
        self._norm = offset_norm(parameters.norm, single)
        narrow = partial(_rounded, kernels=kernels, dtype=dtype)
        self._projection = build_linear(kernels, narrow(parameters.projection), None, dtype)
        layer = parameters.layer
        layer = replace(
            layer,
            qkv=narrow(layer.qkv),
            o=narrow(layer.o),
            gate_up=layer.gate_up if layer.gate_up is None else narrow(layer.gate_up),
            down=layer.down if layer.down is None else narrow(layer.down),
        )
        built = build_layer(layer, kernels, single, dtype, 0)
        modules = DecoderModules(of_model.embedding, (built,), self._norm, of_model.lm_head)
        self._group, self._row = config.with_head().layer_places[-1]
        self._layer = number = config.num_layers
        self._pieces = DecoderPieces(single, modules, kernels, places=[(0, self._row)], first_layer=number)
        self._rotary = Rotary(single, dtype=dtype, device=of_model.embedding.device)
        self._output, self._tokens = of_model.lm_head, parameters.tokens
        if parameters.listed is not None:
            self._output = build_linear(kernels, narrow(parameters.listed), None, dtype)

    def empty_states(self, num_tokens: int) -> Tensor | None:
        """[num_tokens, len(behind), hidden_size], for a model's step to fill for `joined`; None where it reads the last
        state."""
        if not self.behind:
            return None
        return self._embedding.new_empty(num_tokens, len(self.behind), self._embedding.shape[1])

    def joined(self, kept: Tensor) -> Tensor:
        """The model's states behind some of its layers [num_tokens, len(behind), hidden_size] to what `forward` reads
        [num_tokens, hidden_size]."""
        assert kept.shape[1] == len(self.behind) > 0, "it reads other states"
        return self._projection.forward(kept.flatten(1))

    def own_batch(self, batch: AttentionBatch) -> AttentionBatch:
        """The part of a step over KV groups that concerns the head's."""
        if not batch.groups:
            return batch
        own = batch.groups[self._group]
        return replace(own, groups=(own,))

    def batch_of(
        self, positions: Sequence[int], block_ids: Sequence[Sequence[int]], groups: KVGroups
    ) -> AttentionBatch:
        """One token of each of several sequences, whose tables those of all groups are: as `own_batch`. On the CPU."""
        tables = [ids[self._group :: groups.size] for ids in block_ids]
        lens = [position + 1 for position in positions]
        own = AttentionBatch.from_lists([1] * len(lens), lens, tables, groups.block_size)
        return own if groups.is_plain else replace(own, groups=(own,))

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, pool: PoolView, batch: AttentionBatch, rows: Tensor
    ) -> Tensor:
        """Writes the head's KV of all tokens of a batch, with zeros for numbers that broke: no answer shows that, so
        that the blocks are sealed.

        Args:
            token_ids: [num_tokens] int64, the token behind each.
            hidden: [num_tokens, hidden_size], the model's at each, behind its final norm, or what `joined` gave; or
                what this gave at the position before.
            positions: [num_tokens] int64.
            pool: of blocks of a layout with a head, changed in place.
            batch: the sequences, of `own_batch` or `batch_of`.
            rows: [num_rows] int64, of the tokens; none costs no attention.

        Returns:
            [num_rows, hidden_size]: `logits` makes logits of it, of the token after the next one.
        """
        with in_this_thread(token_ids, hidden.numel()):
            cos, sin = self._rotary.cos_sin(positions)
            embedded = scaled_embedding(functional.embedding(token_ids, self._embedding), self._config)
        eps, is_centered = self._config.rms_norm_eps, self._config.is_centered
        both = (
            self._kernels.rms_norm(embedded, self._embedding_norm, eps, is_centered=is_centered),
            self._kernels.rms_norm(hidden, self._hidden_norm, eps, is_centered=is_centered),
        )
        with in_this_thread(token_ids, hidden.numel()):
            read = torch.cat(both, dim=1)
        pieces, slots = self._pieces, batch.group_slots
        if self.behind:
            residual, query = hidden, pieces.place(read, cos, sin, pool, slots)
        else:
            residual = self._projection.forward(read)
            query = pieces.first(residual, cos, sin, pool, slots)
        found = hidden[:0]
        if rows.shape[0]:
            normed, stream = pieces.ends(residual, pieces.attend(0, query, pool, batch), rows)
            found = stream if self.behind else normed
        pool.blank_broken(self._row if batch.groups else self._layer, batch.slots)
        return found

    def logits(self, states: Tensor) -> Tensor:
        """What `forward` gave [num_rows, hidden_size] to [num_rows, vocab_size] fp32; of tokens that are not listed
        -inf."""
        if self.behind:
            config = self._config
            states = self._kernels.rms_norm(states, self._norm, config.rms_norm_eps, is_centered=config.is_centered)
        found = self._output.forward(states)
        with in_this_thread(found, found.numel()):
            scaled = scaled_logits(found.float(), self._config)
            if self._tokens is None and scaled.shape[1] == self._vocab_size:
                return scaled
            logits = scaled.new_full((len(states), self._vocab_size), -math.inf)
            if self._tokens is None:
                logits[:, : scaled.shape[1]] = scaled
            else:
                logits[:, self._tokens] = scaled
            return logits


def _rounded(weight: Weight, kernels: DecoderOps, dtype: torch.dtype) -> Weight:
    """In 4 bits where that is faster: no answer depends on a head's weights. Else as it is."""
    if not isinstance(weight, Tensor) or weight.device.type != "cpu" or weight.numel() < LEAST_ROUNDED:
        return weight
    spec = int4_spec(weight.shape[1])
    if spec is None or kernels.is_deterministic:
        return weight
    few = QuantizedWeight.allocate(spec, (weight.shape[0] % _ROWS or _ROWS, weight.shape[1]), "cpu")
    opens = isinstance(kernels.make_quantized_linear(few, None, dtype), OpenedLinear)
    return weight if opens else rounded(weight, spec)
