"""The gated delta rule by the C++ kernels."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64, c_void_p

from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.linear import LANES, is_bf16
from shared.kernels.delta_layer import DeltaLayer, check_delta_attention, state_words
from shared.kernels.pool_view import PoolView


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("conv", "decay", "decay_bias", "norm")),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps", "number", "parts")),
        ("by_channel", c_int64),
    ]


class _Step(Structure):
    _fields_ = [
        ("projected", c_void_p),
        ("stride", c_int64),
        ("words", c_void_p),
        *((name, c_int64) for name in ("block_stride", "num_runs", "run_words", "run_stride", "part_stride")),
        ("states", c_void_p),
        *((name, c_int64) for name in ("num_states", "num_seqs", "block_size", "is_by_token")),
        *((name, c_void_p) for name in ("query_start", "seq_lens", "out")),
    ]


def fits_delta(layer: DeltaLayer) -> bool:
    """Whether the C++ kernels take these sizes, which must fit vectors."""
    return layer.key_dim % LANES == 0 and layer.value_dim % LANES == 0


def delta_attention(
    library: ctypes.CDLL, projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch
) -> Tensor:
    """`DecoderOps.delta_attention` of a layer that fits."""
    check_delta_attention(projected, layer, pool, batch)
    words, is_by_token = state_words(pool, layer.num_parts, layer.places), batch.token_states is not None
    states = batch.token_states if is_by_token else batch.state_blocks
    assert states is not None
    assert all(tensor.is_contiguous() for tensor in (batch.query_start, batch.seq_lens, layer.norm))
    out = projected.new_empty(projected.shape[0], layer.value_size)
    weights = (tensor.data_ptr() for tensor in (layer.conv, layer.decay, layer.decay_bias, layer.norm))
    heads = (layer.num_key_heads, layer.num_value_heads, layer.key_dim, layer.value_dim)
    of_layer = _Layer(*weights, *heads, layer.kernel_size, layer.number, layer.num_parts, layer.is_by_channel)
    step = _Step(
        projected.data_ptr(),
        projected.stride(0),
        words.data_ptr(),
        words.stride(0),
        words.shape[1],
        words.shape[3],
        words.stride(1),
        words.stride(2),
        states.data_ptr(),
        states.shape[2],
        batch.num_seqs,
        batch.block_size,
        is_by_token,
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        out.data_ptr(),
    )
    library.tandem_delta_attention(ctypes.byref(of_layer), ctypes.byref(step), layer.eps, is_bf16(projected))
    return out
