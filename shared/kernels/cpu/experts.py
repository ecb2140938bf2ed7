"""Experts and batched linear layers of the CPU backend: weights in panels, one weight's behind the other's."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.activation.rules import GATES, SILU, Activation
from shared.kernels.cpu.coded import CodedLinear, fits_codes
from shared.kernels.cpu.linear import LANES, PANEL, Library, PackedLinear, is_bf16, pack, scratch_floats
from shared.kernels.experts.reference import check_experts, check_forward
from shared.kernels.experts.routing import check_choose_experts
from shared.kernels.experts.rules import Routing
from shared.kernels.quantized import QuantizedWeight, Weight


def choose_experts(library: Library, logits: Tensor, bias: Tensor | None, rules: Routing) -> tuple[Tensor, Tensor]:
    """See `DecoderOps`."""
    check_choose_experts(logits, bias, rules)
    assert logits.is_contiguous(), "the logits are strided"
    num_tokens, top_k = logits.shape[0], rules.top_k
    ids, weights = torch.empty((num_tokens, top_k), dtype=torch.int64), torch.empty((num_tokens, top_k))
    sizes = (c_int64 * 8)(
        num_tokens,
        rules.num_experts,
        top_k,
        rules.num_groups,
        rules.top_groups,
        rules.group_score,
        rules.scoring == "sigmoid",
        rules.is_normalised,
    )
    pointers = (logits.data_ptr(), None if bias is None else bias.data_ptr(), ids.data_ptr(), weights.data_ptr())
    library().tandem_choose_experts(*pointers, sizes, rules.scale, is_bf16(logits))
    return ids, weights


class PackedExperts:
    """See `Experts`: the panels of those experts alone are read that have tokens. Any sizes: what does not fit vectors
    is padded with zeros, which change no sum."""

    def __init__(
        self,
        library: Library,
        gate_up: Tensor,
        down: Tensor,
        first_expert: int,
        *,
        own: bool,
        activation: Activation = SILU,
    ) -> None:
        """As for `DecoderOps.make_experts`."""
        check_experts(gate_up, down)
        self._library = library
        self._first_expert = first_expert
        self._activation = activation
        self._num_experts, _, self._hidden = gate_up.shape
        more_hidden, more_inner = -self._hidden % PANEL, -down.shape[2] % LANES
        if more_hidden or more_inner:
            halves = gate_up.view(self._num_experts, 2, down.shape[2], self._hidden)
            gate_up = functional.pad(halves, (0, more_hidden, 0, more_inner)).flatten(1, 2)
            down = functional.pad(down, (0, more_inner, 0, more_hidden))
        elif not own:
            gate_up, down = gate_up.clone(), down.clone()
        self._inner = down.shape[2]
        self._gate_up: PackedLinear = pack(library, gate_up.flatten(0, 1), None)
        self._down: PackedLinear = pack(library, down.flatten(0, 1), None)

    @classmethod
    def of_codes(
        cls,
        library: Library,
        gate_up: PackedLinear,
        down: PackedLinear,
        num_experts: int,
        first_expert: int,
        activation: Activation,
    ) -> PackedExperts:
        """Weights in codes, all experts' panels one behind the other."""
        made = cls.__new__(cls)
        made._library = library
        made._first_expert = first_expert
        made._activation = activation
        made._num_experts = num_experts
        made._hidden, made._inner = gate_up.in_size, down.in_size
        made._gate_up, made._down = gate_up, down
        return made

    @property
    def nbytes(self) -> int:
        """See `Experts`."""
        return self._gate_up.nbytes + self._down.nbytes

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        check_forward(x, expert_ids, weights, self._hidden)
        hidden = self._gate_up.in_size
        wide = functional.pad(x, (0, hidden - self._hidden)) if hidden > self._hidden else x
        out = torch.empty_like(wide)
        if x.shape[0]:
            self._run(wide, expert_ids.contiguous(), weights.contiguous(), out)
        return out if hidden == self._hidden else out[:, : self._hidden].contiguous()

    def _run(self, x: Tensor, expert_ids: Tensor, weights: Tensor, out: Tensor) -> None:
        assert x.dtype == self._gate_up.dtype, f"{x.dtype} times {self._gate_up.dtype}"
        num_tokens, hidden = x.shape
        top_k, inner = expert_ids.shape[1], self._inner
        activation, gate = self._activation, GATES.index(self._activation.gate)
        pairs = num_tokens * top_k
        rooms = [x.new_empty((pairs, size)) for size in (hidden, 2 * inner, inner, hidden)]
        rooms.append(torch.empty(scratch_floats(pairs, max(hidden, inner))))  # fp32
        packed = [(c_int64 * 2)(weight.panel_stride, weight.form) for weight in (self._gate_up, self._down)]
        self._library().tandem_experts(
            x.data_ptr(),
            expert_ids.data_ptr(),
            weights.data_ptr(),
            self._gate_up.panels.data_ptr(),
            packed[0],
            self._down.panels.data_ptr(),
            packed[1],
            out.data_ptr(),
            ctypes.byref((c_void_p * len(rooms))(*(room.data_ptr() for room in rooms))),
            ctypes.byref((c_int64 * 7)(num_tokens, top_k, hidden, inner, self._first_expert, self._num_experts, gate)),
            activation.alpha,
            activation.limit,
            is_bf16(x),
        )


def coded_experts(
    library: Library, gate_up: Weight, down: Weight, first_expert: int, dtype: torch.dtype, activation: Activation
) -> PackedExperts | None:
    """None where these weights are not in codes that the kernels read. They are freed."""
    if not (isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight)):
        return None
    if (
        not (fits_codes(gate_up, dtype) and fits_codes(down, dtype))
        or gate_up.index is not None
        or down.index is not None
    ):
        return None
    num_experts = gate_up.shape[0]
    packed = [CodedLinear.pack(library, weight.flattened(), None, dtype) for weight in (gate_up, down)]
    return PackedExperts.of_codes(library, packed[0], packed[1], num_experts, first_expert, activation)


class PackedBatchedLinear:
    """See `BatchedLinear`; any sizes, as for `PackedExperts`."""

    def __init__(self, library: Library, weight: Tensor, *, own: bool) -> None:
        """weight: [num_parts, out_size, in_size], contiguous; `own` as for `DecoderOps.make_linear`."""
        self._library = library
        self._num_parts, self._out_size, self._in_size = weight.shape
        more_out, more_in = -self._out_size % PANEL, -self._in_size % LANES
        if more_out or more_in:
            weight = functional.pad(weight, (0, more_in, 0, more_out))
        elif not own:
            weight = weight.clone()
        self._padded_out = weight.shape[1]
        self._packed: PackedLinear = pack(library, weight.flatten(0, 1), None)

    @property
    def nbytes(self) -> int:
        """See `BatchedLinear`."""
        return self._packed.nbytes

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `BatchedLinear`."""
        num_rows, num_parts, in_size = x.shape
        assert (num_parts, in_size) == (self._num_parts, self._in_size), f"{tuple(x.shape)}"
        assert x.dtype == self._packed.dtype, f"{x.dtype} times {self._packed.dtype}"
        assert x.stride(2) == 1, "the columns of x are strided"
        if out is None:
            out = x.new_empty((num_rows, num_parts, self._out_size))
        assert out.shape == (num_rows, num_parts, self._out_size), f"{tuple(out.shape)}"
        assert out.dtype == x.dtype
        assert out.stride(2) == 1, "the columns of the result are strided"
        if num_rows == 0:
            return out
        padded_in = self._packed.in_size
        if padded_in > in_size:
            x = functional.pad(x, (0, padded_in - in_size))
        fits = self._padded_out == self._out_size
        found = out if fits else x.new_empty((num_rows, num_parts, self._padded_out))
        self._run(x, found)
        return out if fits else out.copy_(found[..., : self._out_size])

    def _run(self, x: Tensor, out: Tensor) -> None:
        num_rows, num_parts, in_size = x.shape
        scratch = torch.empty(num_parts * num_rows * in_size)
        self._library().tandem_batched_linear(
            x.data_ptr(),
            self._packed.panels.data_ptr(),
            self._packed.panel_stride,
            out.data_ptr(),
            scratch.data_ptr(),
            ctypes.byref((c_int64 * 4)(x.stride(0), x.stride(1), out.stride(0), out.stride(1))),
            num_parts,
            num_rows,
            in_size,
            self._padded_out,
            is_bf16(x),
        )
