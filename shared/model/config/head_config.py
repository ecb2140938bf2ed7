"""A head as data: one layer that guesses the token after the next one. Where what it reads comes from, its layer, and
where what it gives goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.model.config.layer_config import LayerConfig

if TYPE_CHECKING:
    from shared.model.config.model_config import ModelConfig


@dataclass(frozen=True)
class HeadNames:
    """How a checkpoint names a head's tensors, each behind `prefix`."""

    prefix: str
    layer: str  # what the names of its layer begin with
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    embedding: str  # where it is not the model's, or a copy of it
    output: str  # likewise, the output projection


@dataclass(frozen=True)
class HeadConfig:
    """A head of a model's own checkpoint (multi-token prediction), or of a folder apart (EAGLE-3).

    The former's projection joins the token and the model's state behind its final norm, before the layer; what it
    gives behind its norm is read like that state. The latter's joins the states behind some of the model's layers, its
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


def numbered_names(layer: int) -> HeadNames:
    """Of a head that is the layer of that number (DeepSeek V3, GLM-4.5)."""
    prefix = f"model.layers.{layer}."
    return HeadNames(prefix, "", "enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")


QWEN_NAMES = HeadNames(
    "mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "embed_tokens", "lm_head"
)
"""Of Qwen3-Next and Qwen 3.5."""
EAGLE_NAMES = HeadNames(
    "", "midlayer.", "midlayer.input_layernorm", "midlayer.hidden_norm", "fc", "norm", "embed_tokens", "lm_head"
)
"""Of EAGLE-3."""
