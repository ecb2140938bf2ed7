"""Linear layers and experts of plain torch over weights in fewer bits, whose codes are opened to fp32 part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.activation.activations import SILU, Activation
from shared.kernels.activation.reference import act_and_mul
from shared.kernels.experts.loras import add_expert_loras, make_plain_loras
from shared.kernels.experts.reference import check_forward, combine
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.lora.step import ExpertLoras, ExpertParts, StepExpertLoras
from shared.kernels.pool_view import encode
from shared.kernels.quantized import OPEN_ELEMENTS, QuantizedWeight, Weight


class OpenedLinear:
    """See `Linear`; codes are opened to fp32 some rows at a time, whatever the device."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`weight`: a single one; `dtype`: of x and the result."""
        self.weight = weight
        self.bias = bias
        self.in_size, self.out_size, self.dtype, self.nbytes = weight.in_size, weight.out_size, dtype, weight.nbytes
        self._parts = weight.parts()

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = opened_product(rounded_input(x, self.weight.spec), self._parts)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)


def rounded_input(x: Tensor, spec: LinearSpec) -> Tensor:
    """fp32 [num_rows, in_size] that a weight of this form is multiplied with; see `LinearSpec.rounds_input`."""
    if not spec.rounds_input or x.dtype == torch.float32:
        return x.float()
    codes, scales = encode(x, torch.int8)
    return codes.float() * scales[:, None]


def opened_product(x: Tensor, parts: Sequence[QuantizedWeight]) -> Tensor:
    """[num_rows, in_size] fp32 times the transposed parts, one behind the other."""
    step = max(1, OPEN_ELEMENTS // parts[0].in_size)
    found = [
        functional.linear(x, part.piece(first, min(first + step, part.out_size)).dense())
        for part in parts
        for first in range(0, part.out_size, step)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class OpenedExperts:
    """See `Experts`; an expert's weights are opened to fp32 where tokens chose it. Either may be dense."""

    def __init__(self, gate_up: Weight, down: Weight, first_expert: int, activation: Activation = SILU) -> None:
        """As for `DecoderOps.make_experts`."""
        self._gate_up = gate_up
        self._down = down
        self._first_expert = first_expert
        self._activation = activation

    @property
    def nbytes(self) -> int:
        """See `Experts`."""
        return self._gate_up.nbytes + self._down.nbytes

    def make_loras(self, parts: Mapping[int, ExpertParts], like: Tensor) -> ExpertLoras:
        """See `Experts`."""
        num_experts, hidden_size, expert_size = self._down.shape
        return make_plain_loras(parts, num_experts, hidden_size, expert_size, like)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, loras: StepExpertLoras | None = None) -> Tensor:
        """See `Experts`."""
        check_forward(x, expert_ids, weights, self._gate_up.shape[2])
        local = expert_ids - self._first_expert
        found = x.new_zeros((*expert_ids.shape, x.shape[1]))
        for expert in range(self._gate_up.shape[0]):
            tokens, places = (local == expert).nonzero(as_tuple=True)
            if tokens.numel():
                rows = x[tokens]
                both = add_expert_loras(
                    _product(rows, self._gate_up[expert]), rows, loras, expert, tokens, is_down=False
                )
                inner = act_and_mul(both, self._activation)
                own = _product(inner, self._down[expert])
                found[tokens, places] = add_expert_loras(own, inner, loras, expert, tokens, is_down=True)
        return combine(found, weights)


def _product(x: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return functional.linear(x, weight)
    return opened_product(rounded_input(x, weight.spec), weight.parts()).to(x.dtype)


def make_opened_linear(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> OpenedLinear:
    """`DecoderOps.make_quantized_linear` of the backends without kernels for fewer bits."""
    return OpenedLinear(weight, bias, dtype)


def make_opened_experts(
    gate_up: Weight,
    down: Weight,
    first_expert: int,
    dtype: torch.dtype,  # noqa: ARG001
    activation: Activation = SILU,
) -> OpenedExperts:
    """`DecoderOps.make_quantized_experts` of the backends without kernels for fewer bits."""
    return OpenedExperts(gate_up, down, first_expert, activation)
