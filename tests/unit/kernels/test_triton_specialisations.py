"""How many kernels a serving mix compiles: a step of a new shape must not stop for a compiler."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView
from shared.kernels.sampling.history import Penalties, TokenHistory
from shared.kernels.sampling.rows import SamplingRows

from .comparing import triton_kernels
from .compiling import count_specialisations
from .conftest import Run

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HIDDEN, VOCAB = 8, 2, 128, 16, 256, 1000


def run_step(query_lens: list[int], kv_lens: list[int], table_width: int, shift: int) -> None:
    """One layer and the sampling of one step; `shift` moves the metadata off the alignment of an allocation."""
    kernels, num_tokens = triton_kernels(), sum(query_lens)
    tables = [[0] * table_width for _ in query_lens]
    batch = AttentionBatch.from_lists(query_lens, kv_lens, tables, BLOCK_SIZE)
    for name in ("query_start", "seq_lens", "block_tables", "slots"):
        tensor = getattr(batch, name)
        moved = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)[shift:].view(tensor.shape)
        object.__setattr__(batch, name, moved)
    x, norm = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(HIDDEN, dtype=torch.bfloat16)
    pool = torch.zeros(2, 2, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)
    query, key = (torch.zeros(num_tokens, n, HEAD_DIM, dtype=torch.bfloat16) for n in (HEADS, KV_HEADS))
    angles = torch.zeros(num_tokens, HEAD_DIM, dtype=torch.bfloat16)
    kernels.add_rms_norm(x, x, norm, 1e-5)
    kernels.rms_norm(x, norm, 1e-5)
    for layer in (0, 1):
        kernels.rotate_and_write(
            query, key, key, angles, angles, PoolView.over(pool), layer, batch.slots, q_norm=None, k_norm=None, eps=1e-6
        )
        kernels.paged_attention(query, PoolView.over(pool), layer, batch, scale=0.1, window=None)
    kernels.act_and_mul(torch.zeros(num_tokens, 2 * HIDDEN, dtype=torch.bfloat16))
    rows = len(query_lens)
    kernels.sample_tokens(
        torch.zeros(rows, VOCAB),
        SamplingRows.from_lists([1.0] * rows, [5] * rows, [0.9] * rows, [0.1] * rows, range(rows), range(rows)),
    )
    masks = torch.zeros(rows, -(-VOCAB // 32) + shift, dtype=torch.int32)
    kernels.mask_tokens(torch.zeros(rows, VOCAB), masks, torch.arange(rows + shift)[shift:] - shift)
    slots, factor = torch.arange(rows + shift)[shift:] - shift, torch.ones(rows + shift)[shift:]
    history = TokenHistory.empty(rows, VOCAB, "cpu")
    kernels.penalize(torch.zeros(rows, VOCAB), history, Penalties(slots, factor, factor, factor))
    kernels.count_tokens(history, slots, slots)
    ids = torch.zeros(rows + shift, dtype=torch.int64)[shift:]
    kernels.scatter_blocks(kernels.gather_blocks(pool, ids), pool, ids)
    kernels.block_checksums(pool, ids)
    kernels.block_key_sums(pool, ids, torch.zeros(pool[:1].nbytes // 8, dtype=torch.int64))


def count_over_a_serving_mix() -> dict[str, int]:
    """Batches of 1 to 600 sequences, decodes, chunks and both, short and long tables, any alignment of metadata."""

    def calls() -> None:
        for shift in (0, 1):
            for num_seqs in (1, 2, 3, 16, 17, 64, 200, 600):
                for width in (1, 4, 16, 33):
                    kv_lens = [width * BLOCK_SIZE] * num_seqs
                    run_step([1] * num_seqs, kv_lens, width, shift)
                    run_step([16, *[1] * (num_seqs - 1)], kv_lens, width, shift)
            for chunk in (2, 15, 16, 17, 31, 100, 512, 1000):
                run_step([chunk], [1024], 64, shift)

    return count_specialisations(calls)


@pytest.mark.slow
def test_a_serving_mix_needs_few_kernels(compiled_afresh: Run) -> None:
    assert compiled_afresh(count_over_a_serving_mix) == {
        "plan_decode_items": 1,
        "decode_parts": 1,
        "plan_prefill_items": 1,
        "prefill_tiles": 2,  # short chunks and long ones
        "rms_norm_rows": 2,  # with and without the residual
        "rotate_and_write_heads": 1,
        "act_and_mul_tiles": 1,
        "copy_blocks": 2,  # gathering and scattering
        "checksum_stretches": 1,
        "key_sum_stretches": 1,
        "find_peaks": 1,
        "measure_levels": 1,
        "place_ranges": 2,  # after the first pass over thresholds, and after the second
        "refine_levels": 1,
        "race_and_collect": 1,
        "choose_tokens": 1,
        "mask_rows": 1,
        "penalize_rows": 1,
        "count_chosen": 1,
    }


def names_left_general() -> set[str]:
    """Arguments of the last pass of sampling that the compiler knows by their type alone."""
    from shared.kernels.sampling.jit import choose_tokens

    return {parameter.name for parameter in choose_tokens.params if parameter.do_not_specialize}


@pytest.mark.slow
def test_pointers_that_meet_in_one_are_equally_general(compiled: Run) -> None:
    # Triton 3.6 cannot compile a choice between two for gfx942 otherwise; later versions can, so nothing else shows it.
    assert compiled(names_left_general) >= {"logits", "listed"}
