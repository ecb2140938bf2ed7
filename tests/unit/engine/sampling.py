"""Tokens from logits in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.plan import NoToken, SampledToken, SampleSpec
from shared.engine.runner import sampler
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pending_step import PendingStep
from shared.kernels.torch_backend import TorchKernels


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> tuple[SampledToken | NoToken, ...]:
    """As a step of the runner does it, on the CPU."""
    link = DeviceLink(torch.device("cpu"))
    tokens = sampler.sample(logits, specs, TorchKernels(), link.send)
    logprobs = sampler.TopLogprobs.of(logits, tokens, specs, link.send)
    return PendingStep(tokens, logprobs, specs, link, lambda row: f"row {row}").result().sampled
