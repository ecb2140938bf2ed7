"""All layers of a decoder by one call of the C++ kernels: what an op costs outside them is paid once a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from shared.kernels.backend import LayerSizes, LayerWeights
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.packing import LANES, PANEL, in_size, is_bf16, is_packed, tight_bytes
from shared.kernels.kv_dtype import assert_kv_dtype

_PACKED = ("qkv", "o", "gate_up", "down")
_PLAIN = ("input_norm", "qkv_bias", "q_norm", "k_norm", "o_bias", "post_norm", "gate_up_bias", "down_bias")


class _Weight(Structure):
    _fields_ = [("panels", c_void_p), ("tight_bytes", c_int64)]


class _Layer(Structure):
    _fields_ = [
        *((name, _Weight) for name in _PACKED),
        *((name, c_void_p) for name in _PLAIN),
        ("window", c_int64),
    ]


class _Sizes(Structure):
    _fields_ = [
        (name, c_int64)
        for name in (
            "num_layers", "hidden", "heads", "kv_heads", "dim", "inner",
            "tokens", "num_seqs", "block_size", "max_blocks", "num_rows", "is_bf16",
            "kv_is_bf16",
        )
    ]  # fmt: skip


class _Memory(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "residual", "normed", "qkv", "placed", "attended", "out", "gate_up", "activated", "scratch", "blocks",
            "cos", "sin", "tables", "query_start", "seq_lens", "slots", "rows",
        )
    ]  # fmt: skip


class CpuLayerStack:
    """See `LayerStack`. Safe for calls from several threads at once."""

    def __init__(
        self, library: Callable[[], ctypes.CDLL], layers: Sequence[LayerWeights], last_norm: Tensor, sizes: LayerSizes
    ) -> None:
        """Keeps the weights, whose shapes `fits` has agreed to."""
        self._library = library
        self._layer_weights = tuple(layers)  # owners of the memory that `_layers` points to
        self._last_norm = last_norm
        self._sizes = sizes
        self._hidden = last_norm.shape[0]
        self._inner = layers[0].gate_up.shape[0] * PANEL // 2
        self._dtype = last_norm.dtype
        for layer in layers:
            found = tuple(in_size(weight) for weight in _projections(layer))
            expected = (self._hidden, sizes.num_heads * sizes.head_dim, self._hidden, self._inner)
            assert found == expected, f"projections of {found} columns, not {expected}"
        self._layers = (_Layer * len(layers))(*(_layer(*pair) for pair in zip(layers, sizes.windows, strict=True)))

    def run(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_blocks: Tensor, batch: AttentionBatch, logit_rows: Tensor
    ) -> Tensor:
        """See `LayerStack`."""
        sizes, num_tokens = self._sizes, x.shape[0]
        shape = (len(self._layers), 2, sizes.num_kv_heads, batch.block_size, sizes.head_dim)
        tables = (batch.block_tables, batch.query_start, batch.seq_lens, batch.slots)
        assert x.shape == (batch.num_tokens, self._hidden)
        assert cos.shape == sin.shape == (num_tokens, sizes.head_dim)
        assert kv_blocks.shape[1:] == shape, f"blocks of {tuple(kv_blocks.shape[1:])}, not {shape}"
        assert x.dtype == cos.dtype == sin.dtype == self._dtype
        assert_kv_dtype(self._dtype, kv_blocks.dtype)
        assert logit_rows.dtype == torch.int64
        assert all(tensor.is_contiguous() for tensor in (x, cos, sin, kv_blocks, logit_rows, *tables))
        heads, kv_heads = (count * sizes.head_dim for count in (sizes.num_heads, sizes.num_kv_heads))
        normed = x.new_empty((num_tokens, self._hidden))
        widths = (heads + 2 * kv_heads, heads, heads, self._hidden, 2 * self._inner, self._inner)
        rooms = [x.new_empty((num_tokens, width)) for width in widths]
        scratch = torch.empty(num_tokens * max(self._hidden, heads, self._inner))
        memory = _Memory(
            *(tensor.data_ptr() for tensor in (x, normed, *rooms, scratch, kv_blocks, cos, sin, *tables, logit_rows))
        )
        step = _Sizes(
            num_layers=len(self._layers),
            hidden=self._hidden,
            heads=sizes.num_heads,
            kv_heads=sizes.num_kv_heads,
            dim=sizes.head_dim,
            inner=self._inner,
            tokens=num_tokens,
            num_seqs=batch.num_seqs,
            block_size=batch.block_size,
            max_blocks=batch.block_tables.shape[1],
            num_rows=logit_rows.shape[0],
            is_bf16=is_bf16(x),
            kv_is_bf16=is_bf16(kv_blocks),
        )
        self._library().tandem_layers(
            ctypes.byref(self._layers),
            self._last_norm.data_ptr(),
            ctypes.byref(step),
            ctypes.byref(memory),
            sizes.eps,
            sizes.head_dim**-0.5,
        )
        return normed[: logit_rows.shape[0]]


def fits(layers: Sequence[LayerWeights], last_norm: Tensor, sizes: LayerSizes) -> bool:
    """Whether every op of these layers has its C++ kernel: sizes of whole vectors, all projections packed."""
    return (
        all(is_packed(weight) for layer in layers for weight in _projections(layer))
        and last_norm.shape[0] % LANES == 0
        and sizes.head_dim % (2 * LANES) == 0
        and sizes.head_dim <= 512
    )


def _projections(layer: LayerWeights) -> Iterator[Tensor]:
    return (getattr(layer, name) for name in _PACKED)


def _layer(layer: LayerWeights, window: int | None) -> _Layer:
    weights = (_Weight(weight.data_ptr(), tight_bytes(weight)) for weight in _projections(layer))
    tensors = (getattr(layer, name) for name in _PLAIN)
    return _Layer(*weights, *(None if tensor is None else tensor.data_ptr() for tensor in tensors), window or 0)
