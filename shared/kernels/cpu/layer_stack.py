"""All layers of a decoder by one call of the C++ kernels: what an op costs outside them is paid once a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.collectives.cpu_group import CpuGroup
from shared.collectives.interface import Collectives
from shared.kernels.activation.activations import GATES
from shared.kernels.cpu.c_pool import CPool
from shared.kernels.cpu.linear import LANES, Library, PackedLinear, is_bf16, scratch_floats
from shared.kernels.cpu.lora import CpuLora, CpuRows, sum_floats
from shared.kernels.layer_stack import LayerInputs, LayerSizes, LayerWeights
from shared.kernels.lora.step import PROJECTIONS, PackedAdapter, StepLoras
from shared.kernels.pool_view import assert_kv_dtype

_NORMS = ("input_norm", "q_norm", "k_norm", "attention_norm", "post_norm", "output_norm")


class _Linear(Structure):
    _fields_ = [("panels", c_void_p), ("panel_stride", c_int64), ("form", c_int64), ("bias", c_void_p)]


class _Layer(Structure):
    _fields_ = [
        *((name, _Linear) for name in PROJECTIONS),
        *((name, c_void_p) for name in _NORMS),
        ("window", c_int64),
        ("is_chunked", c_int64),
        ("temperature", c_int64),
        ("encoding", c_int64),
        ("group", c_int64),
        ("row", c_int64),
    ]


class _Sizes(Structure):
    _fields_ = [
        (name, c_int64)
        for name in (
            "num_layers", "hidden", "heads", "kv_heads", "dim", "inner",
            "tokens", "num_seqs", "max_blocks", "num_rows", "is_bf16", "gate", "is_centered", "num_kept",
        )
    ]  # fmt: skip


class _Memory(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "residual", "normed", "qkv", "placed", "attended", "out", "gate_up", "activated", "scratch", "pool",
            "cos", "sin", "groups", "query_start", "seq_lens", "rows", "kept", "kept_behind",
        )
    ]  # fmt: skip


class _Group(Structure):
    _fields_ = [("tables", c_void_p), ("slots", c_void_p)]


class _StepLoras(Structure):
    _fields_ = [
        ("loras", c_void_p),
        ("count", c_int64),
        ("rows", c_void_p),
        ("kept", c_void_p),
        ("sums", c_void_p),
        ("most_ranks", c_int64),
    ]


class _Additions:
    """The memory of what adapters add in one step."""

    def __init__(
        self, loras: StepLoras, addresses: Sequence[NDArray[np.uint64]], most_ranks: int, most_in: int
    ) -> None:
        self._table = np.ascontiguousarray(np.stack(addresses, axis=-1))  # [num_layers * 4, additions]
        self._sums = torch.empty(sum_floats(loras.rows.num_rows, most_in, most_ranks), dtype=torch.float32)
        self.struct = _StepLoras(
            self._table.ctypes.data,
            len(addresses),
            CpuRows.of(loras.rows).address,
            CpuRows.of(loras.kept).address,
            self._sums.data_ptr(),
            most_ranks,
        )


class CpuLayerStack:
    """See `LayerStack`. Safe for calls from several threads at once."""

    @classmethod
    def build(
        cls,
        library: Library,
        layers: Sequence[LayerWeights],
        last_norm: Tensor,
        sizes: LayerSizes,
        group: Collectives | None = None,
    ) -> CpuLayerStack | None:
        """None where an op of these layers has no C++ kernel: sizes of no whole vectors, projections not in panels, or
        a group whose sums are not the kernels' own. `group`: as for `stack_layers`."""
        projections = [_packed_projections(layer) for layer in layers]
        packed = [layer for layer in projections if layer is not None]
        fits = last_norm.shape[0] % LANES == 0 and sizes.head_dim % (2 * LANES) == 0 and sizes.head_dim <= 512
        if not fits or len(packed) != len(layers) or not (group is None or isinstance(group, CpuGroup)):
            return None
        return cls(library, layers, packed, last_norm, sizes, group)

    def __init__(
        self,
        library: Library,
        layers: Sequence[LayerWeights],
        projections: Sequence[Sequence[PackedLinear]],
        last_norm: Tensor,
        sizes: LayerSizes,
        group: CpuGroup | None = None,
    ) -> None:
        """`projections`: those of each layer, in the order of `PROJECTIONS`."""
        self._library = library
        self._layer_weights = tuple(layers)  # owners of the memory that `_layers` points to
        self._last_norm = last_norm
        self._sizes = sizes
        self._group = group
        self._kept_behind = np.array(sizes.kept_behind, dtype=np.int64)
        assert all(0 < count < len(layers) for count in sizes.kept_behind)
        self._hidden = last_norm.shape[0]
        self._inner = projections[0][-1].in_size
        self._dtype = last_norm.dtype
        for linears in projections:
            found = tuple(linear.in_size for linear in linears)
            expected = (self._hidden, sizes.num_heads * sizes.head_dim, self._hidden, self._inner)
            assert found == expected, f"projections of {found} columns, not {expected}"
        self._addresses: WeakKeyDictionary[PackedAdapter, tuple[NDArray[np.uint64], int]] = WeakKeyDictionary()
        self._layers, self._grouped = (
            (_Layer * len(layers))(
                *(
                    _layer(*of_layer, sizes, index)
                    for index, of_layer in enumerate(zip(layers, projections, places, strict=True))
                )
            )
            for places in ([(0, index) for index in range(len(layers))], sizes.places)
        )

    def run(self, inputs: LayerInputs, logit_rows: Tensor) -> Tensor:
        """See `LayerStack`."""
        x, cos, sin, pool, batch, loras, kept = inputs
        sizes, num_tokens = self._sizes, x.shape[0]
        groups = batch.groups or (batch,)
        layers = self._grouped if batch.groups else self._layers
        num_rows = 1 + max(row for _, row in sizes.places) if batch.groups else len(layers)
        shape = (num_rows, 2, sizes.num_kv_heads, batch.block_size, sizes.head_dim)
        # Behind these layers' KV there may be a head's.
        found = (min(pool.num_layers, num_rows), pool.num_planes, pool.num_kv_heads, pool.block_size, pool.head_dim)
        places = [tensor for part in groups for tensor in (part.block_tables, part.slots)]
        assert x.shape == (batch.num_tokens, self._hidden)
        assert cos.shape == sin.shape == (sizes.num_encodings, num_tokens, sizes.head_dim)
        assert found == shape, f"blocks of {found}, not {shape}"
        assert x.dtype == cos.dtype == sin.dtype == self._dtype
        assert_kv_dtype(self._dtype, pool.dtype)
        assert logit_rows.dtype == torch.int64
        num_kept = 0 if kept is None else len(sizes.kept_behind)
        tensors = (x, cos, sin, logit_rows, batch.query_start, batch.seq_lens, *places)
        if kept is not None:
            assert kept.shape == (num_tokens, num_kept, self._hidden)
            assert kept.dtype == x.dtype
            tensors = (*tensors, kept)
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert all(part.block_tables.shape == batch.block_tables.shape for part in groups)
        heads, kv_heads = (count * sizes.head_dim for count in (sizes.num_heads, sizes.num_kv_heads))
        normed = x.new_empty((num_tokens, self._hidden))
        widths = (heads + 2 * kv_heads, heads, heads, self._hidden, 2 * self._inner, self._inner)
        rooms = [x.new_empty((num_tokens, width)) for width in widths]
        scratch = torch.empty(scratch_floats(num_tokens, max(self._hidden, heads, self._inner)))
        c_pool = CPool.of(pool)
        c_groups = (_Group * len(groups))(
            *(_Group(part.block_tables.data_ptr(), part.slots.data_ptr()) for part in groups)
        )
        memory = _Memory(
            *(tensor.data_ptr() for tensor in (x, normed, *rooms, scratch)),
            ctypes.addressof(c_pool),
            *(tensor.data_ptr() for tensor in (cos, sin)),
            ctypes.addressof(c_groups),
            *(tensor.data_ptr() for tensor in (batch.query_start, batch.seq_lens, logit_rows)),
            _pointer(kept),
            self._kept_behind.ctypes.data,
        )
        step = _Sizes(
            num_layers=len(layers),
            hidden=self._hidden,
            heads=sizes.num_heads,
            kv_heads=sizes.num_kv_heads,
            dim=sizes.head_dim,
            inner=self._inner,
            tokens=num_tokens,
            num_seqs=batch.num_seqs,
            max_blocks=batch.block_tables.shape[1],
            num_rows=logit_rows.shape[0],
            is_bf16=is_bf16(x),
            gate=GATES.index(sizes.activation.gate),
            is_centered=sizes.is_centered,
            num_kept=num_kept,
        )
        assert loras is None or isinstance(loras, StepLoras), "additions of another backend"
        additions = None if loras is None or not loras.rows.num_rows else self._additions(loras)
        failed = self._library().tandem_layers(
            ctypes.byref(layers),
            self._last_norm.data_ptr(),
            ctypes.byref(step),
            ctypes.byref(memory),
            None if additions is None else ctypes.byref(additions.struct),
            sizes.eps,
            sizes.scale,
            sizes.softcap or 0.0,
            None if self._group is None else self._group.handle,
        )
        if self._group is not None:
            self._group.check(failed)
        return normed[: logit_rows.shape[0]]

    def _additions(self, loras: StepLoras) -> _Additions:
        found = []
        for adapter in loras.adapters:
            if adapter not in self._addresses:
                self._addresses[adapter] = _addresses(adapter)
            found.append(self._addresses[adapter])
        most_in = max(self._hidden, self._inner, self._sizes.num_heads * self._sizes.head_dim)
        return _Additions(loras, [addresses for addresses, _ in found], max(ranks for _, ranks in found), most_in)


def _addresses(adapter: PackedAdapter) -> tuple[NDArray[np.uint64], int]:
    """(where the C++ kernels read each addition, 0 for none [num_layers * 4]; the most ranks of one)."""
    found = [lora for lora in adapter.loras if lora is None or isinstance(lora, CpuLora)]
    assert len(found) == len(adapter.loras), "an adapter of another backend"
    addresses = np.array([0 if lora is None else lora.address for lora in found], dtype=np.uint64)
    return addresses, max((lora.ranks for lora in found if lora is not None), default=0)


def _packed_projections(layer: LayerWeights) -> tuple[PackedLinear, ...] | None:
    linears = tuple(getattr(layer, name) for name in PROJECTIONS)
    return linears if all(isinstance(linear, PackedLinear) for linear in linears) else None


def _layer(
    layer: LayerWeights,
    projections: Sequence[PackedLinear],
    place: tuple[int, int],
    sizes: LayerSizes,
    index: int,
) -> _Layer:
    linears = (
        _Linear(linear.panels.data_ptr(), linear.panel_stride, linear.form, _pointer(linear.bias))
        for linear in projections
    )
    norms = (_pointer(getattr(layer, name)) for name in _NORMS)
    temperature = sizes.temperatures[index]
    return _Layer(
        *linears,
        *norms,
        sizes.windows[index] or 0,
        sizes.are_chunked[index],
        -1 if temperature is None else temperature,
        sizes.encodings[index],
        *place,
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
