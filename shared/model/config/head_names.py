"""How checkpoints name the tensors of a head, the layer that guesses the token after the next one."""

from __future__ import annotations

from dataclasses import dataclass


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


def numbered_names(layer: int) -> HeadNames:
    """Names of a head that is the layer of that number (DeepSeek V3, GLM-4.5)."""
    prefix = f"model.layers.{layer}."
    return HeadNames(prefix, "", "enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")


QWEN_NAMES = HeadNames(
    "mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "embed_tokens", "lm_head"
)
"""Names of the head's tensors in Qwen3-Next and Qwen 3.5."""
EAGLE_NAMES = HeadNames(
    "", "midlayer.", "midlayer.input_layernorm", "midlayer.hidden_norm", "fc", "norm", "embed_tokens", "lm_head"
)
"""Names of the tensors of an EAGLE-3 head."""
