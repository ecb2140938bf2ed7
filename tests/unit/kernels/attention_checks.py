"""Triton's attention against the formula and the torch reference, on any device: run interpreted here, on a GPU in
`tests/gpu`. Only functions that are called in the right process import triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shared.kernels.attention import reference as attention_reference
from shared.kernels.pool_view import PoolView

from .attention_case import LAYER, AttentionCase
from .comparing import assert_near, triton_kernels


def scale_of(case: AttentionCase) -> float:
    """The models' own: a steeper one magnifies the rounding of the scores, the reference's as well."""
    return float(case.query.shape[-1] ** -0.5)


def exact_attention(case: AttentionCase, window: int | None, **scoring: Any) -> Tensor:
    """The formula in fp64 at the models' scale: a bound on the kernel's own error, free of the reference's.

    In fp32 torch's attention is the less exact of the two: it rounds about three times as far as the kernels do, and
    how far depends on the processor.
    """
    return case.expected(window, scale_of(case), **scoring)


def expected_attention(case: AttentionCase, window: int | None) -> Tensor:
    """The torch reference on the CPU in fp32, whatever the case's device and dtype."""
    batch = replace(case.batch, **{name: value.cpu() for name, value in _tensors(case.batch).items()})
    query, pool = case.query.cpu().float(), replace(case.pool, memory=case.pool.memory.cpu())
    if pool.dtype == torch.float16:  # the one dtype that is not read beside fp32
        pool = PoolView.over(pool.rows.float())
    return attention_reference.paged_attention(query, pool, LAYER, batch, scale=scale_of(case), window=window)


def _tensors(batch: object) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def check_attention(
    plan: list[tuple[int, int]],
    *,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    is_chunked: bool = False,
    has_guesses: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> None:
    """A mix of chunks and single tokens; `shape` are `AttentionCase`'s sizes."""
    case = AttentionCase(plan, dtype=dtype, device=device, **shape)
    case.batch = replace(case.batch, has_guesses=has_guesses)
    scoring = {"softcap": softcap, "sinks": case.sinks if has_sinks else None, "is_chunked": is_chunked}
    output = triton_kernels().paged_attention(
        case.query, case.pool, LAYER, case.batch, scale=scale_of(case), window=window, **scoring
    )
    assert output.dtype == dtype
    assert_near(output, exact_attention(case, window, **scoring))


def check_holes(plan: list[tuple[int, int]], *, has_guesses: bool, device: str = "cpu", **shape: Any) -> None:
    """A window of one token; of the block that the holes in front of it repeat some tokens are not written yet."""
    case = AttentionCase(plan, device=device, **shape)
    case.batch = replace(case.batch, has_guesses=has_guesses)
    case.put_holes(window=1)
    output = triton_kernels().paged_attention(case.query, case.pool, LAYER, case.batch, scale=scale_of(case), window=1)
    assert_near(output, exact_attention(case, 1))


def check_split_decode(
    plan: list[int] | list[tuple[int, int]],
    *,
    queries: int = 1,
    tile: int,
    min_tiles: int = 1,
    parts_per_multiprocessor: int = 8,
    window: int | None = None,
    has_sinks: bool = False,
    is_chunked: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> None:
    """Single tokens, or those of (tokens, KV length), with a chosen way to cut sequences, short parts too."""
    from shared.kernels.attention.decode.launch import decode_attention
    from shared.kernels.attention.decode.splits import DecodeConfig

    lens = [item if isinstance(item, tuple) else (1, item) for item in plan]
    case = AttentionCase(lens, dtype=dtype, device=device, **shape)
    output = torch.full_like(case.query, float("nan"))
    config = DecodeConfig(tile, min_tiles, parts_per_multiprocessor, 4, 2, uneven_parts=parts_per_multiprocessor + 3)
    sinks = case.sinks if has_sinks else None
    decode_attention(
        case.query, case.pool, LAYER, case.batch, output, scale=scale_of(case), window=window, sinks=sinks,
        is_chunked=is_chunked, config=config, queries=queries,
    )  # fmt: skip
    assert_near(output.flatten(1), exact_attention(case, window, sinks=sinks, is_chunked=is_chunked))


def check_lengths_come_from_the_device(device: str = "cpu") -> None:
    """A launch planned for long sequences serves the shorter ones that the device tensors now hold."""
    from shared.kernels.attention.decode.launch import decode_attention

    case = AttentionCase([(1, 90), (1, 64), (1, 300), (1, 7)], block_size=16, head_dim=16, device=device)
    output = torch.full_like(case.query, float("nan"))
    short = [33, 64, 1, 0]
    case.batch.seq_lens.copy_(torch.tensor(short, dtype=torch.int32))
    decode_attention(case.query, case.pool, LAYER, case.batch, output, scale=scale_of(case), window=None)
    case.batch = replace(case.batch, kv_lens=(33, 64, 1, 7))
    expected = expected_attention(case, None)
    assert_near(output[:3].flatten(1), expected[:3])
    assert torch.equal(output[3], torch.zeros_like(output[3]))


def check_layers_share_a_plan(device: str = "cpu") -> None:
    """A step is planned once; each layer finds the tickets of the parts as the one before left them: all zero."""
    from shared.kernels.attention.decode import launch, schedule

    planned: list[schedule.DecodePlan] = []

    def plan_and_note(*args: Any, **view: Any) -> schedule.DecodePlan:
        planned.append(schedule.plan_decode(*args, **view))
        return planned[-1]

    case = AttentionCase([(1, 900), (1, 30), (5, 40)], block_size=16, head_dim=16, device=device)
    kept, launch.plan_decode = launch.plan_decode, plan_and_note
    try:
        outputs = [
            triton_kernels().paged_attention(
                case.query, case.pool, LAYER, case.batch, scale=scale_of(case), window=None
            )
            for _ in range(3)
        ]
    finally:
        launch.plan_decode = kept
    (only,) = planned
    assert only.part_means.shape[0] == only.num_slots  # there were parts to merge
    assert not bool(only.tickets.any())
    for output in outputs:
        assert_near(output, exact_attention(case, None))


def check_prefill_tiles(
    plan: list[tuple[int, int]],
    *,
    rows: int,
    tile: int,
    window: int | None,
    is_chunked: bool = False,
    most: int = 2**31 - 1,
    device: str = "cpu",
    **shape: Any,
) -> None:
    """Chunks of at most `most` tokens with chosen tiles, the others and single tokens left alone."""
    from shared.kernels.attention.prefill.configs import PrefillConfig
    from shared.kernels.attention.prefill.launch import prefill_attention

    case = AttentionCase(plan, device=device, **shape)
    output = torch.full_like(case.query, float("nan"))
    prefill_attention(
        case.query, case.pool, LAYER, case.batch, output, scale=scale_of(case), window=window,
        is_chunked=is_chunked, config=PrefillConfig(rows, tile, num_warps=4, num_stages=2), most=most,
    )  # fmt: skip
    long = torch.tensor([1 < query_len <= most for query_len, _ in plan for _ in range(query_len)], device=device)
    assert_near(output[long].flatten(1), exact_attention(case, window, is_chunked=is_chunked)[long.cpu()])
    assert bool(output[~long].isnan().all())


def check_long_chunks(
    plan: list[tuple[int, int]], *, unit: int, by_torch: bool = False, device: str = "cpu", **shape: Any
) -> None:
    """Every chunk in squares and rectangles of `unit` tokens, by torch's ops beside the formula, or by cuDNN beside the
    kernel for any chunk."""
    from shared.kernels.attention.prefill.cudnn import long_attention
    from shared.kernels.attention.prefill.launch import prefill_attention

    case = AttentionCase(plan, device=device, **shape)
    scale = scale_of(case)
    output = torch.full_like(case.query, float("nan"))
    for index in range(len(plan)):
        long_attention(
            case.query, case.pool, LAYER, case.batch, index, output, scale=scale, unit=unit,
            attend=_attend_by_torch if by_torch else None,
        )  # fmt: skip
    if by_torch:
        expected = exact_attention(case, None)
    else:
        usual = torch.full_like(case.query, float("nan"))
        prefill_attention(case.query, case.pool, LAYER, case.batch, usual, scale=scale, window=None)
        expected = usual.flatten(1)
    assert_near(output.flatten(1), expected)


def check_prepared_shapes(*, max_tokens: int, unit: int) -> None:
    """What `prepare_thread` computes has the shapes of all chunks up to `max_tokens`, with any context."""
    from shared.kernels.attention.prefill.cudnn import prepare_thread
    from shared.kernels.attention.prefill.cuts import cut_chunk

    prepared: set[tuple[int, int, bool]] = set()

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
        prepared.add((query.shape[2], key.shape[2], is_causal))
        return _attend_by_torch(query, key, value, scale, is_causal)

    pool = AttentionCase([(1, 1)], head_dim=16, block_size=8).pool
    pool.memory.zero_()
    prepare_thread(4, torch.float32, pool, max_tokens, unit, attend)
    for query_len in range(1, max_tokens + 1):
        for context in range(40 * unit):
            cut = cut_chunk(query_len, context + query_len, unit)
            assert (cut.square, cut.square, True) in prepared
            assert all((part.rows, part.keys, False) in prepared for part in cut.rectangles)


def _attend_by_torch(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = (rows.float().repeat_interleave(group, dim=1) for rows in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    output = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
    return output.copy_(scores.softmax(-1) @ value), scores.logsumexp(-1, keepdim=True)


def check_latents(
    plan: list[tuple[int, int]],
    *,
    num_heads: int,
    dim: int,
    tile: int | None = None,
    heads: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Rows that are key and value. With `tile`, sequences are cut into parts of one tile each, and a program serves
    `heads` query heads."""
    from shared.kernels.attention.decode.splits import DecodeConfig
    from shared.kernels.attention.latent.launch import LatentConfig, latent_attention

    case = AttentionCase(
        plan, (num_heads, 1), dim, block_size=16, dtype=dtype, device=device, kv_dtype=kv_dtype, num_planes=1
    )
    config = None if tile is None else LatentConfig(heads, DecodeConfig(tile, 1, 8, num_warps=4, num_stages=2))
    scale = scale_of(case)
    found = latent_attention(case.query, case.pool, LAYER, case.batch, scale=scale, config=config)
    assert_near(found, exact_attention(case, None))
    whole = triton_kernels().paged_attention(case.query, case.pool, LAYER, case.batch, scale=scale, window=None)
    assert_near(whole, exact_attention(case, None))


def check_slot_offsets_pass_32_bits(device: str = "cpu") -> None:
    """A pool of 2^21 blocks of 2^12 elements: the last rows lie past 2^32."""
    from .probes import store_offsets

    table = torch.tensor([2**21 - 1, 3, -7], dtype=torch.int32, device=device)
    offsets = torch.empty(64, dtype=torch.int64, device=device)
    store_offsets[(1,)](table, offsets, 20, 4096, TILE=64, BLOCK_SIZE=16, HEAD_DIM=8)
    first = [(2**21 - 1) * 4096 + position * 8 for position in range(16)]
    second = [3 * 4096 + position * 8 for position in range(4)]
    assert offsets[:20].tolist() == first + second
    assert int(offsets[20:].max()) < 4096  # past the length, block 0 stands in for what the table holds
