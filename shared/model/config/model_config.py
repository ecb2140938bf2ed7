"""A model's configuration: `config.json`, read once, validated, frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shared.kernels.activation.activations import SILU, Activation
from shared.kv.groups import STATE_WINDOW, group_layers
from shared.kv.layout import BlockLayout, KVFormat
from shared.model.config.delta_config import DeltaConfig
from shared.model.config.head_names import HeadNames
from shared.model.config.latent_config import LatentConfig
from shared.model.config.layer_config import PLAIN_NAMES, LayerConfig, QkNorm, Temperature, TensorNames
from shared.model.config.moe_config import MoeConfig
from shared.model.config.quantization import QuantizationConfig
from shared.model.config.rope_config import RopeConfig

__all__ = ["HeadConfig", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer as data: its layers, and what they share. The families differ in nothing else.

    With latents there is one KV head, and `head_dim` is that of a query.
    """

    architecture: str  # one of `shared.model.families.registry.ARCHITECTURES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense feed-forward blocks
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    eos_token_ids: tuple[int, ...]
    dtype: str  # one of SUPPORTED_DTYPES, as published
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    query_scale: float | None = None  # factor on query · key; None: 1 / √head_dim
    softcap: float | None = None  # c: scores become c · tanh(score / c)
    has_sinks: bool = False  # whether each head has a score that takes its share of the weights and adds nothing
    is_gated: bool = False  # whether a head's query comes with a gate, whose sigmoid is a factor on what it attends to
    is_interleaved: bool = False  # whether rotated pairs are (2i, 2i + 1) in the weights, else (i, i + half)
    activation: Activation = SILU
    norm_offset: float = 0.0  # on the norms' weights as they are stored
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward block give
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # as `softcap`, after `logit_scale`
    is_centered: bool = False  # whether the layers' norms take the mean from what they read: layer norms without bias
    is_parallel: bool = False  # whether the feed-forward block reads what attention reads, behind the same norm
    names: TensorNames = PLAIN_NAMES
    moe: MoeConfig | None = None  # None: every layer is dense
    latent: LatentConfig | None = None  # None: attention over the keys and values of heads
    delta: DeltaConfig | None = None  # of layers with a state; None: there are none
    num_unused_layers: int = 0  # layers of a checkpoint behind the decoder's own, such as those that predict further
    head: HeadConfig | None = None  # the first of these where it can guess: see `HeadParameters`
    quantization: QuantizationConfig | None = None  # None: the checkpoint's weights are plain numbers

    @property
    def num_layers(self) -> int:
        """Layers that a token passes."""
        return len(self.layers)

    def with_head(self) -> ModelConfig:
        """With the head's layer behind the others."""
        assert self.head is not None, "a model without a head"
        return replace(self, layers=(*self.layers, self.head.layer), head=None, num_unused_layers=0)

    @property
    def has_stacked_experts(self) -> bool:
        """Whether all experts of a layer lie in one tensor."""
        return self.moe is not None and self.moe.stacked is not None

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The encodings of positions that layers have, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if not layer.has_state))

    @property
    def temperatures(self) -> tuple[Temperature, ...]:
        """The temperatures that layers have, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.temperature for layer in self.layers if layer.temperature is not None))

    def temperature_encoding(self, layer: int) -> int | None:
        """Which of a step's encodings has the factors of a layer's temperature as its cosines: they follow those of
        `ropes`."""
        temperature = self.layers[layer].temperature
        return None if temperature is None else len(self.ropes) + self.temperatures.index(temperature)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that angles are given for."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of a head's value, and of what it attends to."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def attention_scale(self) -> float:
        """Factor on query · key."""
        if self.latent is not None:
            return self.latent.scale
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def has_dense(self) -> bool:
        """Whether any layer has a dense feed-forward block."""
        return not all(layer.has_experts for layer in self.layers)

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return sum(layer.has_experts for layer in self.layers)

    @property
    def prefix_length(self) -> int:
        """Trained length, where the keys of a prefix depend on whether the text is longer than that; else 0."""
        return max(
            (rope.original_max_position_embeddings for rope in self.ropes if rope and rope.needs_lengths), default=0
        )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward block is made of experts."""
        return self.layers[layer].has_experts

    @property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers with attention by KV group: see `group_layers`. A window as long as the longest text is none."""
        attending = [layer for layer, found in enumerate(self.layers) if not found.has_state]
        kept = self._kept
        return tuple(
            tuple(attending[place] for place in places) for places in group_layers([kept[layer] for layer in attending])
        )

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers with a state, rising."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_state)

    @property
    def num_state_parts(self) -> int:
        """Equal parts of each state, of some key heads each: each lies in the memory of equally many KV heads, and so
        is split over ranks as these are. Beside latents they are parts of the one head's memory. 0 without states."""
        if self.delta is not None and self.delta.places is not None:
            return self.delta.places.count
        return 0 if self.delta is None else math.gcd(self.num_kv_heads, self.delta.num_key_heads)

    @property
    def layer_places(self) -> tuple[tuple[int, int], ...]:
        """(KV group, place among its layers) of each layer; of those with a state (the first group of states, place
        among all of them), since how many blocks they take follows from the blocks' bytes."""
        groups = (*self.kv_groups, self.state_layers)
        places = {layer: (group, row) for group, layers in enumerate(groups) for row, layer in enumerate(layers)}
        return tuple(places[layer] for layer in range(self.num_layers))

    @property
    def _kept(self) -> tuple[int | None, ...]:
        """For each layer the tokens that it sees of the longest text; None for all."""
        most = self.max_position_embeddings
        return tuple(None if layer.window is None or layer.window >= most else layer.window for layer in self.layers)

    def block_layout(
        self, block_size: int, kv_dtype: str, *, grouped: bool = False, has_head: bool = False
    ) -> BlockLayout:
        """Blocks of `block_size` tokens of this model's KV, kept in `kv_dtype`, a key of `BYTES_PER_ELEMENT`: of all
        layers, or `grouped`, of those of one KV group each, as always where layers have states. `has_head`: with that
        of the head's layer behind them."""
        if has_head:
            return self.with_head().block_layout(block_size, kv_dtype, grouped=grouped)
        kv_format = (
            KVFormat(kv_dtype, self.num_kv_heads, self.head_dim)
            if self.latent is None
            else KVFormat(kv_dtype, 1, self.latent.cached_dim, num_planes=1)
        )
        if not grouped and self.delta is None:
            return BlockLayout(self.num_layers, block_size, kv_format)
        groups, kept = self.kv_groups, self._kept
        windows = [{kept[layer] for layer in layers} for layers in groups]
        layout = BlockLayout(
            max(map(len, groups)),
            block_size,
            kv_format,
            tuple(found.pop() if len(found) == 1 else None for found in windows),
        )
        return layout if self.delta is None else self._with_states(layout, self.delta)

    def _with_states(self, layout: BlockLayout, delta: DeltaConfig) -> BlockLayout:
        """With the groups of states behind those of attention: a block of each has a piece of all layers' states, which
        lie behind each other. Heads have even sizes, so each has room for whole numbers of states."""
        num_groups = -(-len(self.state_layers) * delta.state_bytes // layout.block_bytes)
        return replace(layout, windows=(*layout.windows, *[STATE_WINDOW] * num_groups), num_states=num_groups)


@dataclass(frozen=True)
class HeadConfig:
    """A head as data: one layer that guesses the token after the next one, what it reads, and where what it gives goes.

    It is of a model's own checkpoint (multi-token prediction), or of a folder apart (EAGLE-3). The former's projection
    joins the token and the model's state behind its final norm, before the layer; what it gives behind its norm is read
    like that state. The latter's joins the states behind some of the model's layers, its
    layer's attention reads token and state side by side, and what it gives is read like the joined states.
    """

    layer: LayerConfig  # as it lies behind the model's layers, in their blocks
    names: HeadNames
    behind: tuple[int, ...] = ()  # how many of the model's first layers gave each state; none: all, and the final norm
    own: ModelConfig | None = None  # sizes of a layer from a folder apart; None: the model's
    num_guessable: int = 0  # tokens of its own output projection; 0: it guesses by the model's

    @property
    def is_apart(self) -> bool:
        """Whether it has a folder of its own."""
        return self.own is not None
