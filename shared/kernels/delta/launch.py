"""Launchers of Triton's gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kernels import device
from shared.kernels.batch import AttentionBatch
from shared.kernels.delta import prompt_jit, reference, step_jit
from shared.kernels.delta.reference import count_ones
from shared.kernels.delta_layer import DeltaLayer, check_delta_attention, state_words
from shared.kernels.device import next_power_of_2
from shared.kernels.pool_view import PoolView

MOST_KEYS = 128
"""Elements of a key that programs hold whole; torch's operations compute what is wider."""
MOST_STEPPED = 1 << 12
"""Elements of a matrix in one program of a decode step, which norms what a whole one gives."""
CHUNK, EXACT_CHUNK = 64, 32
"""Tokens whose updates are solved for together. Exact products are of three parts, for which a longer chunk would take
more memory than some devices share."""
CHANNELS = 128
TOKENS = 32
COLUMNS = 32
"""Of a matrix, in one program of a prompt."""
NORMED = 2048
"""Elements that a program norms."""
FETCHED_AHEAD = 160 * 1024
"""Bytes of shared memory in which a chunk lies beside the one before."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the kernels are compiled for."""

    layer: DeltaLayer
    words: int  # numbers of a block
    block_size: int  # tokens

    @property
    def heads(self) -> dict[str, int]:
        layer = self.layer
        return {
            "NUM_HEADS": layer.num_value_heads,
            "NUM_KEY_HEADS": layer.num_key_heads,
            "KEY_DIM": layer.key_dim,
            "VALUE_DIM": layer.value_dim,
            "KEYS": max(16, next_power_of_2(layer.key_dim)),
        }

    @property
    def matrices(self) -> dict[str, int]:
        state, value_dim = self.layer.state_elements, self.layer.value_dim
        has_whole_rows = self.words % value_dim == 0 and state % value_dim == 0
        return {"STATE": state, "WORDS": self.words, "HAS_WHOLE_ROWS": has_whole_rows}

    @property
    def channels(self) -> dict[str, int]:
        layer = self.layer
        return {
            "MIXED": layer.mixed_size,
            "KERNEL": layer.kernel_size,
            "MATRIX": layer.matrix_elements,
            "WORDS": self.words,
        }

    @property
    def taps(self) -> int:
        return next_power_of_2(max(1, self.layer.kernel_size - 1))


def delta_attention(projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> Tensor:
    """`DecoderOps.delta_attention`. Lengths are read on the device: of one-token sequences nothing follows from the
    host's but their number."""
    if layer.key_dim > MOST_KEYS:
        return reference.delta_attention(projected, layer, pool, batch)
    check_delta_attention(projected, layer, pool, batch)
    num_tokens, num_ones = projected.shape[0], count_ones(batch)
    output = projected.new_empty(num_tokens, layer.value_size)
    active = projected.new_empty(num_tokens, layer.mixed_size)
    words = state_words(pool)
    sizes = _Sizes(layer, words.shape[1], batch.block_size)
    if num_ones:
        _step(projected, active, words, batch, output, sizes, num_ones)
    if num_ones < batch.num_seqs:
        _chunks(projected, active, words, batch, output, sizes, num_ones)
    return output


def _step(
    projected: Tensor,
    active: Tensor,
    words: Tensor,
    batch: AttentionBatch,
    output: Tensor,
    sizes: _Sizes,
    num_ones: int,
) -> None:
    layer, states = sizes.layer, batch.state_blocks
    assert states is not None
    of_pool = (words, states, states.shape[2], layer.number)
    tile = min(CHANNELS, next_power_of_2(layer.mixed_size))
    step_jit.convolve_ones[(num_ones, -(-layer.mixed_size // tile))](
        projected, projected.stride(0), layer.conv, *of_pool, active,
        **sizes.channels, TAPS=sizes.taps, TILE=tile, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    keys, columns = sizes.heads["KEYS"], next_power_of_2(layer.value_dim)
    is_normed = keys * columns <= MOST_STEPPED
    columns = min(columns, MOST_STEPPED // keys)
    step_jit.step_heads[(num_ones, layer.num_value_heads, -(-layer.value_dim // columns))](
        projected, projected.stride(0), active, layer.decay, layer.decay_bias, layer.norm, *of_pool, output, layer.eps,
        **sizes.heads, **sizes.matrices, IS_NORMED=is_normed, COLUMNS=columns,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if not is_normed:
        _norm(projected, output, layer, 0, num_ones)


def _chunks(
    projected: Tensor,
    active: Tensor,
    words: Tensor,
    batch: AttentionBatch,
    output: Tensor,
    sizes: _Sizes,
    first_seq: int,
) -> None:
    layer, states = sizes.layer, batch.state_blocks
    assert states is not None
    first_row, num_seqs, most = first_seq, batch.num_seqs - first_seq, max(batch.query_lens[first_seq:])
    num_rows, heads = projected.shape[0] - first_row, layer.num_value_heads
    of_pool = (words, states, states.shape[2], layer.number)
    of_batch = (batch.query_start, batch.seq_lens, first_seq)
    tile = min(CHANNELS, next_power_of_2(layer.mixed_size))
    channel_tiles = -(-layer.mixed_size // tile)
    prompt_jit.convolve_tokens[(-(-most // TOKENS), channel_tiles, num_seqs)](
        projected, projected.stride(0), layer.conv, *of_pool, batch.query_start, first_seq, active,
        **sizes.channels, TILE=tile, TOKENS=TOKENS, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    if layer.kernel_size > 1:
        prompt_jit.keep_tails[(channel_tiles, num_seqs)](
            projected, projected.stride(0), *of_pool, *of_batch,
            **sizes.channels, BLOCK_SIZE=sizes.block_size, TAPS=sizes.taps, TILE=tile,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    shape: dict[str, Any] = {"dtype": torch.float32, "device": projected.device}
    own = torch.empty(num_rows, heads, layer.value_dim, **shape)
    reads = torch.empty(num_rows, heads, layer.key_dim, **shape)
    chunk = CHUNK if projected.dtype == torch.bfloat16 else EXACT_CHUNK
    within = torch.empty(num_rows, heads, chunk, **shape)
    factors = torch.empty(3, num_rows, heads, **shape)
    solved = (own, reads, within, factors, num_rows)
    columns = max(16, min(COLUMNS, next_power_of_2(layer.value_dim)))
    limits = device.device_limits(projected.device)
    num_warps = 4 if limits.arch.startswith(("sm_9", "gfx")) else 8  # of what spills least
    options: dict[str, Any] = {
        **sizes.heads,
        "BLOCK_SIZE": sizes.block_size,
        "CHUNK": chunk,
        "COLUMNS": columns,
        "PRECISION": _precision(projected),
        "enable_fp_fusion": False,
    }
    most_chunks = -(-most // chunk) + 1  # one more where the tokens are cut behind a state that is kept
    prompt_jit.solve_chunks[(most_chunks, heads, num_seqs)](
        projected, projected.stride(0), active, layer.decay, layer.decay_bias, states, states.shape[2], *of_batch,
        first_row, *solved, **options, num_warps=num_warps, num_stages=1,
    )  # fmt: skip
    prompt_jit.pass_chunks[(-(-layer.value_dim // columns), heads, num_seqs)](
        active, *of_pool, *of_batch, first_row, *solved, output, **options, **sizes.matrices, num_warps=4,
        num_stages=2 if limits.shared_bytes >= FETCHED_AHEAD else 1,
    )  # fmt: skip
    _norm(projected, output, layer, first_row, num_rows)


def _norm(projected: Tensor, output: Tensor, layer: DeltaLayer, first_row: int, num_rows: int) -> None:
    values = next_power_of_2(layer.value_dim)
    at_once = min(next_power_of_2(layer.num_value_heads), max(1, NORMED // values))
    prompt_jit.norm_heads[(num_rows, -(-layer.num_value_heads // at_once))](
        projected, projected.stride(0), layer.norm, output, first_row, layer.eps,
        NUM_HEADS=layer.num_value_heads, MIXED=layer.mixed_size, VALUE_DIM=layer.value_dim,
        VALUES=values, HEADS=at_once, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _precision(projected: Tensor) -> str:
    """Of products: of models in bfloat16 factors are rounded to 10 bits, more than the model's own have."""
    if projected.dtype == torch.bfloat16:
        return "tf32"
    return "tf32x3" if device.device_limits(projected.device).arch.startswith("sm_") else "ieee"
