"""Tokens from logits in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.device_link import DeviceLink
from shared.engine.pending_step import PendingStep
from shared.engine.plan import NoToken, SampledToken, SampleSpec
from shared.engine.sampler import TopLogprobs, choose
from shared.kernels.torch_backend import TorchKernels


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> tuple[SampledToken | NoToken, ...]:
    """As a step of the runner does it, on the CPU."""
    link = DeviceLink(torch.device("cpu"))
    tokens = choose(logits, specs, TorchKernels(), link.send)
    logprobs = TopLogprobs.of(logits, tokens, specs, link.send)
    return PendingStep(tokens, logprobs, specs, link, lambda row: f"row {row}").result().sampled
