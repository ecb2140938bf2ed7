"""Experts and batched linear layers of the CPU backend: weights in panels, one weight's behind the other's."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Structure, c_int64, c_void_p
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from shared.kernels.activation.activations import GATES, SILU, Activation
from shared.kernels.cpu.coded import CodedLinear, fits_codes
from shared.kernels.cpu.linear import LANES, PANEL, Library, PackedLinear, is_bf16, pack, scratch_floats
from shared.kernels.cpu.lora import CpuLora
from shared.kernels.experts.reference import check_experts, check_forward
from shared.kernels.experts.routing import check_choose_experts
from shared.kernels.experts.routing_rules import Routing
from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.step import ExpertLoras, ExpertParts, Lora, StepExpertLoras
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

    def make_loras(self, parts: Mapping[int, ExpertParts], like: Tensor) -> ExpertLoras:
        """See `Experts`; padded as the weights are."""
        none, hidden, inner = ExpertParts(), self._gate_up.in_size, self._inner

        def of(found: Sequence[LoraPart], in_size: int, out_size: int) -> CpuLora | None:
            wide = [
                replace(
                    part,
                    a=functional.pad(part.a, (0, in_size - part.a.shape[1])),
                    b=functional.pad(part.b, (0, 0, 0, out_size - part.b.shape[0])),
                    begin=out_size if part.begin else 0,
                )
                for part in found
            ]
            return CpuLora(wide, in_size, like) if wide else None

        each = [parts.get(expert, none) for expert in range(self._num_experts)]
        return ExpertLoras(
            tuple(of(found.gate_up, hidden, inner) for found in each),
            tuple(of(found.down, inner, hidden) for found in each),
        )

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, loras: StepExpertLoras | None = None) -> Tensor:
        """See `Experts`."""
        check_forward(x, expert_ids, weights, self._hidden)
        hidden = self._gate_up.in_size
        wide = functional.pad(x, (0, hidden - self._hidden)) if hidden > self._hidden else x
        out = torch.empty_like(wide)
        if x.shape[0]:
            self._run(wide, expert_ids.contiguous(), weights.contiguous(), out, loras)
        return out if hidden == self._hidden else out[:, : self._hidden].contiguous()

    def _run(self, x: Tensor, expert_ids: Tensor, weights: Tensor, out: Tensor, loras: StepExpertLoras | None) -> None:
        assert x.dtype == self._gate_up.dtype, f"{x.dtype} times {self._gate_up.dtype}"
        num_tokens, hidden = x.shape
        top_k, inner = expert_ids.shape[1], self._inner
        activation, gate = self._activation, GATES.index(self._activation.gate)
        pairs = num_tokens * top_k
        rooms = [x.new_empty((pairs, size)) for size in (hidden, 2 * inner, inner, hidden)]
        rooms.append(torch.empty(scratch_floats(pairs, max(hidden, inner))))  # fp32
        packed = [(c_int64 * 2)(weight.panel_stride, weight.form) for weight in (self._gate_up, self._down)]
        added = None if loras is None else _StepLoras(loras, self._num_experts)
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
            None if added is None else ctypes.byref(added.struct),
            is_bf16(x),
        )


class _LorasStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("gate_up", "down", "adapters")),
        ("num_adapters", c_int64),
        ("most_ranks", c_int64),
    ]


class _StepLoras:
    """The memory of what adapters add to a layer's experts in one step."""

    def __init__(self, loras: StepExpertLoras, num_experts: int) -> None:
        none = ExpertLoras((None,) * num_experts, (None,) * num_experts)
        adapters = [none if adapter is None else adapter for adapter in loras.adapters]
        gate_up, down = (_addresses(sides) for sides in ([x.gate_up for x in adapters], [x.down for x in adapters]))
        of_tokens = loras.rows.remember("tokens", lambda: np.array(loras.rows.additions, dtype=np.int64))
        self._owned = (gate_up, down, of_tokens)
        ranks = (lora.ranks for x in adapters for lora in (*x.gate_up, *x.down) if isinstance(lora, CpuLora))
        self.struct = _LorasStruct(*(array.ctypes.data for array in self._owned), len(adapters), max(ranks, default=0))


def _addresses(sides: Sequence[Sequence[Lora | None]]) -> NDArray[np.uint64]:
    found = [lora for side in sides for lora in side]
    assert all(lora is None or isinstance(lora, CpuLora) for lora in found), "an adapter of another backend"
    return np.array([lora.address if isinstance(lora, CpuLora) else 0 for lora in found], dtype=np.uint64)


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
