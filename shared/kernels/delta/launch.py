"""Launchers of Triton's gated delta rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared.kernels import device
from shared.kernels.batch import AttentionBatch
from shared.kernels.delta import conv_jit, fade_jit, prompt_jit, reference, step_jit
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
"""Columns of a matrix in one program of a prompt. Narrower ones are padded: programs of 16 met an illegal access on a
GPU."""
NORMED = 2048
"""Elements that a program norms."""
FETCHED_AHEAD = 160 * 1024
"""Bytes of shared memory in which a chunk lies beside the one before."""


class _Call:
    """What the launches of one call have in common."""

    def __init__(self, projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> None:
        words, states = state_words(pool, layer.num_parts, layer.places), batch.state_blocks
        assert states is not None
        assert words.is_contiguous(), "the pool is strided"
        _, num_runs, num_parts, run_words = words.shape
        self.projected, self.layer, self.batch = projected, layer, batch
        self.active = projected.new_empty(projected.shape[0], layer.mixed_size)  # what the convolution gives
        self.output = projected.new_empty(projected.shape[0], layer.value_size)
        self.states = (states, states.shape[2])
        self.of_pool = (words, *self.states, layer.number)
        self.heads = {
            "NUM_HEADS": layer.num_value_heads,
            "NUM_KEY_HEADS": layer.num_key_heads,
            "KEY_DIM": layer.key_dim,
            "VALUE_DIM": layer.value_dim,
            "BY_CHANNEL": layer.is_by_channel,
            "KEYS": max(16, next_power_of_2(layer.key_dim)),
        }
        places = {"WORDS": num_runs * run_words, "PARTS": num_parts, "RUN": run_words}
        self.matrices = {
            **places,
            "STATE": layer.part_elements,
            "HAS_WHOLE_ROWS": run_words % layer.value_dim == 0 and layer.part_elements % layer.value_dim == 0,
        }
        self.tile = min(CHANNELS, next_power_of_2(layer.mixed_size))
        self.channels = {
            **places,
            "MIXED": layer.mixed_size,
            "KERNEL": layer.kernel_size,
            "KEY_SIZE": layer.key_size,
            "MATRIX": layer.matrix_elements // num_parts,
            "TILE": self.tile,
        }
        self.num_tiles = -(-layer.mixed_size // self.tile)
        self.taps = next_power_of_2(max(1, layer.kernel_size - 1))

    @property
    def of_token(self) -> tuple[Tensor, int]:
        """What the projections gave, and how many elements are from token to token."""
        return self.projected, self.projected.stride(0)

    @property
    def gates(self) -> tuple[Tensor, Tensor]:
        """Decay and bias of the layer, from which gates and rates are computed."""
        return self.layer.decay, self.layer.decay_bias

    def step(self, num_ones: int) -> None:
        """The first sequences, of one token each."""
        layer = self.layer
        step_jit.convolve_ones[(num_ones, self.num_tiles)](
            *self.of_token, layer.conv, *self.of_pool, self.active,
            **self.channels, TAPS=self.taps, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        keys, columns = self.heads["KEYS"], next_power_of_2(layer.value_dim)
        is_normed = keys * columns <= MOST_STEPPED
        columns = min(columns, MOST_STEPPED // keys)
        step_jit.step_heads[(num_ones, layer.num_value_heads, -(-layer.value_dim // columns))](
            *self.of_token, self.active, *self.gates, layer.norm, *self.of_pool, self.output, layer.eps,
            **self.heads, **self.matrices, IS_NORMED=is_normed, COLUMNS=columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        if not is_normed:
            self._norm(0, num_ones)

    def chunks(self, first_seq: int) -> None:
        """The other sequences; before the first of them `first_seq` tokens lie."""
        layer, batch, projected = self.layer, self.batch, self.projected
        first_row, num_seqs, most = first_seq, batch.num_seqs - first_seq, max(batch.query_lens[first_seq:])
        num_rows, heads = projected.shape[0] - first_row, layer.num_value_heads
        of_batch = (batch.query_start, batch.seq_lens, first_seq)
        conv_jit.convolve_tokens[(-(-most // TOKENS), self.num_tiles, num_seqs)](
            *self.of_token, layer.conv, *self.of_pool, batch.query_start, first_seq, self.active,
            **self.channels, TOKENS=TOKENS, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        if layer.kernel_size > 1:
            conv_jit.keep_tails[(self.num_tiles, num_seqs)](
                *self.of_token, *self.of_pool, *of_batch,
                **self.channels, BLOCK_SIZE=batch.block_size, TAPS=self.taps, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        shape: dict[str, Any] = {"dtype": torch.float32, "device": projected.device}
        own = torch.empty(num_rows, heads, layer.value_dim, **shape)
        reads = torch.empty(num_rows, heads, layer.key_dim, **shape)
        chunk = CHUNK if projected.dtype == torch.bfloat16 and not layer.is_by_channel else EXACT_CHUNK
        within = torch.empty(num_rows, heads, chunk, **shape)
        factors = torch.empty(3, num_rows, heads, **shape)
        since = torch.empty(num_rows, heads, layer.key_dim, **shape) if layer.is_by_channel else factors
        solved = (own, reads, within, factors, num_rows)
        limits = device.device_limits(projected.device)
        # Of what spills least.
        with_four = ("gfx",) if layer.is_by_channel else ("sm_9", "gfx")
        num_warps = 4 if limits.arch.startswith(with_four) else 8
        options: dict[str, Any] = {
            **self.heads,
            "BLOCK_SIZE": batch.block_size,
            "CHUNK": chunk,
            "COLUMNS": COLUMNS,
            "PRECISION": _precision(projected),
            "enable_fp_fusion": False,
        }
        most_chunks = -(-most // chunk) + 1  # one more where the tokens are cut behind a state that is kept
        if layer.is_by_channel:
            fade_jit.fade_chunks[(most_chunks, heads, num_seqs)](
                *self.of_token, *self.gates, *self.states, *of_batch, first_row, since,
                NUM_HEADS=heads, KEY_DIM=layer.key_dim, MIXED=layer.mixed_size, VALUE_DIM=layer.value_dim,
                BLOCK_SIZE=batch.block_size, CHUNK=chunk, KEYS=self.heads["KEYS"], num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        prompt_jit.solve_chunks[(most_chunks, heads, num_seqs)](
            *self.of_token, self.active, *self.gates, since, *self.states, *of_batch, first_row, *solved,
            **options, LEVELS=chunk.bit_length() - 1, num_warps=num_warps, num_stages=1,
        )  # fmt: skip
        prompt_jit.pass_chunks[(-(-layer.value_dim // COLUMNS), heads, num_seqs)](
            self.active, since, *self.of_pool, *of_batch, first_row, *solved, self.output,
            **options, **self.matrices, num_warps=4,
            num_stages=2 if limits.shared_bytes >= FETCHED_AHEAD else 1,
        )  # fmt: skip
        self._norm(first_row, num_rows)

    def _norm(self, first_row: int, num_rows: int) -> None:
        layer = self.layer
        values = next_power_of_2(layer.value_dim)
        at_once = min(next_power_of_2(layer.num_value_heads), max(1, NORMED // values))
        prompt_jit.norm_heads[(num_rows, -(-layer.num_value_heads // at_once))](
            *self.of_token, layer.norm, self.output, first_row, layer.eps,
            NUM_HEADS=layer.num_value_heads, MIXED=layer.mixed_size, VALUE_DIM=layer.value_dim,
            BY_CHANNEL=layer.is_by_channel, VALUES=values, HEADS=at_once, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def delta_attention(projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> Tensor:
    """`DecoderOps.delta_attention`. Lengths are read on the device: of one-token sequences nothing follows from the
    host's but their number."""
    if layer.key_dim > MOST_KEYS or batch.token_states is not None:  # no guesses of models with states on GPUs
        return reference.delta_attention(projected, layer, pool, batch)
    check_delta_attention(projected, layer, pool, batch)
    call, num_ones = _Call(projected, layer, pool, batch), count_ones(batch)
    if num_ones:
        call.step(num_ones)
    if num_ones < batch.num_seqs:
        call.chunks(num_ones)
    return call.output


def _precision(projected: Tensor) -> str:
    """Precision of products: of models in bfloat16 factors are rounded to 10 bits, more than the model's own have."""
    if projected.dtype == torch.bfloat16:
        return "tf32"
    return "tf32x3" if device.device_limits(projected.device).arch.startswith("sm_") else "ieee"
