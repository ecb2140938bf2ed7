"""Experts in plain torch: the definition that the kernels are held to, and what serves where there is none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.activation.activations import SILU, Activation
from shared.kernels.activation.reference import act_and_mul
from shared.kernels.experts.loras import add_expert_loras, make_plain_loras
from shared.kernels.lora.step import ExpertLoras, ExpertParts, StepExpertLoras
from shared.kernels.opened import opened_product, rounded_input
from shared.kernels.quantized import Weight


class PlainExperts:
    """See `Experts`, one after the other; its weights are the caller's, neither copied nor changed. Those in fewer bits
    are opened to fp32 where tokens chose the expert; either may be dense."""

    def __init__(self, gate_up: Weight, down: Weight, first_expert: int, activation: Activation = SILU) -> None:
        """As for `DecoderOps.make_experts`."""
        self.gate_up = gate_up
        self.down = down
        self.first_expert = first_expert
        self.activation = activation

    @property
    def nbytes(self) -> int:
        """See `Experts`."""
        return self.gate_up.nbytes + self.down.nbytes

    def make_loras(self, parts: Mapping[int, ExpertParts], like: Tensor) -> ExpertLoras:
        """See `Experts`."""
        num_experts, hidden_size, expert_size = self.down.shape
        return make_plain_loras(parts, num_experts, hidden_size, expert_size, like)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, loras: StepExpertLoras | None = None) -> Tensor:
        """See `Experts`."""
        check_forward(x, expert_ids, weights, self.gate_up.shape[2])
        local = expert_ids - self.first_expert
        found = x.new_zeros((*expert_ids.shape, x.shape[1]))
        for expert in range(self.gate_up.shape[0]):
            tokens, places = (local == expert).nonzero(as_tuple=True)
            if tokens.numel():
                rows = x[tokens]
                both = _product(rows, self.gate_up[expert])
                inner = act_and_mul(add_expert_loras(both, rows, loras, expert, tokens, is_down=False), self.activation)
                own = _product(inner, self.down[expert])
                found[tokens, places] = add_expert_loras(own, inner, loras, expert, tokens, is_down=True)
        return combine(found, weights)


def _product(x: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return functional.linear(x, weight)
    return opened_product(rounded_input(x, weight.spec), weight.parts()).to(x.dtype)


class PlainBatchedLinear:
    """See `BatchedLinear`; its weight is the caller's, neither copied nor changed."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [num_parts, out_size, in_size]."""
        self.weight = weight

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.weight.nbytes

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `BatchedLinear`."""
        found = torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
        return found if out is None else out.copy_(found)


def make_plain_experts(
    gate_up: Tensor,
    down: Tensor,
    first_expert: int,
    *,
    own: bool,  # noqa: ARG001
    activation: Activation = SILU,
) -> PlainExperts:
    """`DecoderOps.make_experts` of the backends that multiply by weights as they are."""
    check_experts(gate_up, down)
    return PlainExperts(gate_up, down, first_expert, activation)


def make_opened_experts(
    gate_up: Weight,
    down: Weight,
    first_expert: int,
    dtype: torch.dtype,  # noqa: ARG001
    activation: Activation = SILU,
) -> PlainExperts:
    """`DecoderOps.make_quantized_experts` of the backends without kernels for fewer bits."""
    return PlainExperts(gate_up, down, first_expert, activation)


def make_plain_batched_linear(weight: Tensor, *, own: bool) -> PlainBatchedLinear:  # noqa: ARG001
    """`DecoderOps.make_batched_linear` of the backends that multiply by weights as they are."""
    return PlainBatchedLinear(weight)


def combine(found: Tensor, weights: Tensor) -> Tensor:
    """The outputs of each token's experts, weighted and added up in fp32, in the order of its choice.

    Args:
        found: [num_tokens, top_k, hidden_size].
        weights: [num_tokens, top_k] fp32.

    Returns:
        [num_tokens, hidden_size], found's dtype.
    """
    total = found[:, 0].float() * weights[:, 0, None]
    for place in range(1, found.shape[1]):
        total += found[:, place].float() * weights[:, place, None]
    return total.to(found.dtype)


def check_experts(gate_up: Tensor, down: Tensor) -> None:
    """Assert the shapes that `DecoderOps.make_experts` promises."""
    num_experts, both, hidden_size = gate_up.shape
    assert both % 2 == 0, f"gate and up have {both} rows"
    assert down.shape == (num_experts, hidden_size, both // 2), f"{tuple(down.shape)} beside {tuple(gate_up.shape)}"
    assert gate_up.dtype == down.dtype
    assert gate_up.is_contiguous()
    assert down.is_contiguous()


def check_forward(x: Tensor, expert_ids: Tensor, weights: Tensor, hidden_size: int) -> None:
    """Assert what `Experts.forward` asks of its arguments."""
    assert x.dim() == 2
    assert x.shape[1] == hidden_size, f"{x.shape[1]} columns times {hidden_size}"
    assert x.is_contiguous(), "x is strided"
    assert expert_ids.shape == weights.shape
    assert expert_ids.shape[0] == x.shape[0]
    assert expert_ids.dtype == torch.int64
    assert weights.dtype == torch.float32
