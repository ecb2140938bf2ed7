"""A head as data: a layer beside a model's own, which guesses the token after the next one."""

from __future__ import annotations

from dataclasses import dataclass

from shared.model.config.layer_config import LayerConfig


@dataclass(frozen=True)
class HeadNames:
    """How a checkpoint names a head's tensors, each behind `prefix`."""

    prefix: str
    layer: str  # what the names of its layer begin with
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    embedding: str  # of a copy of the model's, which many checkpoints have
    output: str  # likewise, of its output projection


@dataclass(frozen=True)
class HeadConfig:
    """A head of a model's own checkpoint."""

    layer: LayerConfig
    names: HeadNames


def numbered_names(layer: int) -> HeadNames:
    """Of a head that is the layer of that number (DeepSeek V3, GLM-4.5)."""
    prefix = f"model.layers.{layer}."
    return HeadNames(prefix, "", "enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")


QWEN_NAMES = HeadNames(
    "mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "embed_tokens", "lm_head"
)
"""Of Qwen3-Next and Qwen 3.5."""
