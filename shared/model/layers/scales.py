"""Factors and bounds on what enters a decoder's layers, and on its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.model.config.model_config import ModelConfig


def scaled_embedding(x: Tensor, config: ModelConfig) -> Tensor:
    """[num_tokens, hidden_size] rows of the embedding, as they enter the first layer; the factor is rounded to their
    dtype, as it was in training."""
    if config.embedding_scale == 1.0:
        return x
    return x * float(torch.tensor(config.embedding_scale, dtype=x.dtype, device="cpu"))


def scaled_logits(logits: Tensor, config: ModelConfig) -> Tensor:
    """[num_logits, any] fp32, changed in place."""
    if config.logit_scale != 1.0:
        logits *= config.logit_scale
    if config.logit_softcap is not None:
        logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
    return logits
