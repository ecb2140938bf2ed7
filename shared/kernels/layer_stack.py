"""An addition to a backend: all layers of a decoder by one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from shared.collectives.interface import Collectives
from shared.kernels.activation.activations import SILU, Activation
from shared.kernels.backend import Linear
from shared.kernels.batch import AttentionBatch
from shared.kernels.lora.step import Loras
from shared.kernels.pool_view import PoolView


class LayerWeights(Protocol):
    """One layer's weights, as `shared.model.layers.modules.LayerModules` describes them."""

    @property
    def input_norm(self) -> Tensor | None: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def q_norm(self) -> Tensor | None: ...
    @property
    def k_norm(self) -> Tensor | None: ...
    @property
    def attention_norm(self) -> Tensor | None: ...
    @property
    def o(self) -> Linear: ...
    @property
    def post_norm(self) -> Tensor | None: ...  # None: the feed-forward block reads what attention reads
    @property
    def output_norm(self) -> Tensor | None: ...
    @property
    def gate_up(self) -> Linear | None: ...
    @property
    def down(self) -> Linear | None: ...


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes that all layers of a decoder share, and the layers' windows."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Factor on query · key."""
    windows: tuple[int | None, ...]
    """Window of each layer in tokens."""
    are_chunked: tuple[bool, ...]
    """Whether each layer's attention is in chunks, as for `paged_attention`."""
    encodings: tuple[int, ...]
    """Which of the encodings of positions each layer has."""
    temperatures: tuple[int | None, ...]
    """The encoding whose cosines multiply a layer's queries, or None."""
    num_encodings: int
    places: tuple[tuple[int, int], ...]
    """(KV group, place among its layers) of each layer, for pools of KV groups."""
    softcap: float | None = None
    """As for `paged_attention`."""
    activation: Activation = SILU
    """Activation of the feed-forward blocks, one without bounds."""
    is_centered: bool = False
    """Whether the layers' norms are centered, as for `rms_norm`."""
    kept_behind: tuple[int, ...] = ()
    """Numbers of first layers behind which the residual stream can be kept, each less than all of them."""


class LayerInputs(NamedTuple):
    """Inputs that all layers of a decoder share in one step."""

    x: Tensor  # [num_tokens, hidden_size], the embedded tokens, or what the layers before these gave
    cos: Tensor  # [num_encodings, num_tokens, rotary_dim], each as for `rotate_and_write`
    sin: Tensor  # as cos
    pool: PoolView  # changed in place
    batch: AttentionBatch  # the step's sequences
    loras: Loras | None = None  # what adapters add; None where no token has one
    kept: Tensor | None = (
        None  # [num_tokens, len(kept_behind), hidden_size], where the residual stream behind those layers goes
    )


class LayerStack(Protocol):
    """All layers of one decoder."""

    def run(self, inputs: LayerInputs, logit_rows: Tensor) -> Tensor:
        """The output of the decoder's layers for a step, the last norm included.

        Args:
            inputs: of at least one token. Its x is used up: where all tokens are wanted, it is the residual stream
                behind the last layer then.
            logit_rows: [num_logits] int64, the tokens whose output is wanted.

        Returns:
            [num_logits, hidden_size], x's dtype.
        """
        ...


@runtime_checkable
class StacksLayers(Protocol):
    """An addition to a backend: one call for all layers, where it is faster than one for each op."""

    def stack_layers(
        self,
        layers: Sequence[LayerWeights],
        last_norm: Tensor,
        sizes: LayerSizes,
        group: Collectives | None = None,
    ) -> LayerStack | None:
        """The layers of a decoder whose projections this backend made; None where a shape or a kind does not suit.

        `group`: the ranks over which `o` and `down` are split, each rank's giving a part of a sum.

        The stack gives what the ops give one by one, up to the order of fp32 sums.
        """
        ...
