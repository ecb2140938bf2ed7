"""Products with weights in codes, in Triton: the codes are opened in registers, groups are scaled in fp32 behind sums.

A weight lies in words of 16 bits: [rows / GRANULE, steps, GRANULE, WORDS]. A step of DEPTH columns has as many parts,
one behind the other, as a word has codes: word w has the codes of the columns w of each part, the first part's in the
lowest bits. Whole numbers that are multiplied as they are, int8 with int8, lie in rows of bytes.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, N806  # compile-time values are upper case

import triton
import triton.language as tl

from shared.kernels.coded.open_jit import opened_codes
from shared.kernels.kv_codes_jit import encoded
from shared.kernels.overlap_jit import await_kernels_before


@triton.jit
def places_of(columns, step, steps, WORDS: tl.constexpr, GRANULE: tl.constexpr):
    """[COLUMNS, WORDS] int64: where codes of some rows of the weight lie in one step."""
    granules = (columns // GRANULE).to(tl.int64) * steps + step
    return (granules * GRANULE + columns % GRANULE)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]


@triton.jit
def load_x(x_rows, real_rows, k, in_size, IS_WHOLE: tl.constexpr):
    """[ROWS, …]: columns `k` of x."""
    if IS_WHOLE:
        return tl.load(x_rows + k[None, :], mask=real_rows[:, None], other=0)
    return tl.load(x_rows + k[None, :], mask=real_rows[:, None] & (k < in_size)[None, :], other=0)


@triton.jit
def finished(sums, scales, columns, rows, row_scales, bias, num_rows, out_size, GROUP: tl.constexpr):
    """[COLUMNS, ROWS] fp32: with the scales of whole rows of the weight, of x's rows, and the bias."""
    found = sums.to(tl.float32)
    if GROUP == 0:
        found *= tl.load(scales + columns)[:, None]
    if row_scales is not None:
        found *= tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[None, :]
    if bias is not None:
        found += tl.load(bias + columns, mask=columns < out_size, other=0.0).to(tl.float32)[:, None]
    return found


@triton.jit(do_not_specialize=["num_rows", "steps", "num_splits", "steps_a_split", "tickets"])
def multiply_codes(
    x,  # [num_rows, in_size]; int8 where the weight's codes are multiplied as they are
    codes,  # uint16 as above, or int8 [padded out_size, in_size]
    scales,  # [groups, padded out_size] fp32
    zeros,  # [groups, padded out_size] fp32, or None
    row_scales,  # [num_rows] fp32, factors of the result's rows, or None
    bias,  # [out_size] of the result's dtype, or None
    output,  # [num_rows, out_size]
    parts,  # [num_splits, row tiles, out tiles, ROWS, COLUMNS] of the sums' dtype
    tickets,  # [row tiles, out tiles] int32, all 0 before and after
    num_rows,
    in_size,
    out_size,
    padded_size,
    steps,
    num_splits,
    steps_a_split,
    KIND: tl.constexpr,  # or "whole": int8 times int8
    GROUP: tl.constexpr,  # columns that share a scale; 0: those of a row
    GRANULE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # in_size is a multiple of DEPTH
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (row tiles, out tiles, splits): x weight^T + bias. Splits are added up in their order by the last to end."""
    await_kernels_before(OVERLAPS)
    row_tile, out_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = out_tile * COLUMNS + tl.arange(0, COLUMNS)
    dtype: tl.constexpr = x.dtype.element_ty
    x_rows = x + rows.to(tl.int64)[:, None] * in_size
    begin = split * steps_a_split
    end = tl.minimum(begin + steps_a_split, steps)
    if KIND == "whole":
        total = tl.zeros([COLUMNS, ROWS], tl.int32)
        for step in tl.range(begin, end, num_stages=STAGES):
            code = tl.load(codes + places_of(columns, step, steps, DEPTH, 1))
            numbers = load_x(x_rows, rows < num_rows, step * DEPTH + tl.arange(0, DEPTH), in_size, IS_WHOLE)
            total = tl.dot(code, tl.trans(numbers), total, out_dtype=tl.int32)
    else:
        PARTS: tl.constexpr = 4 if KIND == "int4" else 2
        WIDTH: tl.constexpr = DEPTH // PARTS  # columns of a part
        SCALED: tl.constexpr = PARTS if GROUP == 0 or GROUP >= DEPTH else GROUP // WIDTH  # parts that share a scale
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        zero = None
        if KIND == "int4":
            zero = tl.full([COLUMNS], 8.0, tl.float32)
        if GROUP == 0 and zeros is not None:
            zero = tl.load(zeros + columns)
        for step in tl.range(begin, end, num_stages=STAGES):
            word = tl.load(codes + places_of(columns, step, steps, WIDTH, GRANULE))
            for group in tl.static_range(PARTS // SCALED):
                if GROUP > 0:
                    of_group = (step * DEPTH + group * SCALED * WIDTH) // GROUP * padded_size + columns
                    scale = tl.load(scales + of_group)
                    of_zero = zero if zeros is None else tl.load(zeros + of_group)
                    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
                else:
                    of_zero = zero
                    sums = total
                for place in tl.static_range(SCALED):
                    k = step * DEPTH + (group * SCALED + place) * WIDTH + tl.arange(0, WIDTH)
                    numbers = load_x(x_rows, rows < num_rows, k, in_size, IS_WHOLE)
                    weight = opened_codes(word, of_zero, dtype, KIND, group * SCALED + place, PTX)
                    sums = tl.dot(weight, tl.trans(numbers), sums, input_precision="ieee")
                if GROUP > 0:
                    total += sums * scale[:, None]
                else:
                    total = sums

    places = rows.to(tl.int64)[None, :] * out_size + columns[:, None]
    real = (rows < num_rows)[None, :] & (columns < out_size)[:, None]
    if num_splits == 1:
        found = finished(total, scales, columns, rows, row_scales, bias, num_rows, out_size, GROUP)
        tl.store(output + places, found.to(output.dtype.element_ty), mask=real)
    else:
        tile = row_tile * tl.num_programs(1) + out_tile
        num_tiles = tl.num_programs(0) * tl.num_programs(1)
        within = tl.arange(0, COLUMNS)[:, None] + tl.arange(0, ROWS)[None, :] * COLUMNS
        is_row = (rows < num_rows)[None, :]
        tl.store(parts + (split * num_tiles + tile).to(tl.int64) * (COLUMNS * ROWS) + within, total, mask=is_row)
        # The barrier orders all threads' stores before the ticket's release; the last ticket's program acquires them.
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel") == num_splits - 1:
            tl.store(tickets + tile, 0)
            added = tl.zeros_like(total)
            for part in range(num_splits):
                place = (part * num_tiles + tile).to(tl.int64) * (COLUMNS * ROWS)
                added += tl.load(parts + place + within, mask=is_row, other=0)
            found = finished(added, scales, columns, rows, row_scales, bias, num_rows, out_size, GROUP)
            tl.store(output + places, found.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["first_row", "steps"])
def open_rows(
    codes,  # uint16 as above
    scales,
    zeros,
    output,  # [num_rows, in_size]
    first_row,  # of the weight
    num_rows,
    in_size,
    padded_size,
    steps,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PTX: tl.constexpr,
):
    """Grid (steps, row tiles): `scale * (code - zero)` of some rows of the weight, rounded to the output's dtype."""
    step = tl.program_id(0)
    local = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    columns = first_row + local
    dtype: tl.constexpr = output.dtype.element_ty
    PARTS: tl.constexpr = 4 if KIND == "int4" else 2
    WIDTH: tl.constexpr = DEPTH // PARTS
    # Rows behind the last are there where the weight's are padded; others are not read.
    is_row = columns < padded_size
    word = tl.load(codes + places_of(columns, step, steps, WIDTH, GRANULE), mask=is_row[:, None], other=0)
    out_rows = output + local.to(tl.int64)[:, None] * in_size
    for part in tl.static_range(PARTS):
        of_group = columns
        if GROUP > 0:
            of_group += (step * DEPTH + part * WIDTH) // GROUP * padded_size
        zero = None
        if KIND == "int4":
            zero = tl.full([COLUMNS], 8.0, tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + of_group, mask=is_row, other=0.0)
        scale = tl.load(scales + of_group, mask=is_row, other=0.0)[:, None]
        k = step * DEPTH + part * WIDTH + tl.arange(0, WIDTH)
        real = (local < num_rows)[:, None] & (k < in_size)[None, :]
        weight = opened_codes(word, zero, dtype, KIND, part, PTX).to(tl.float32) * scale
        tl.store(out_rows + k[None, :], weight.to(dtype), mask=real)


@triton.jit
def round_rows(
    x,  # [num_rows, in_size]
    codes,  # [num_rows, in_size] int8, or whole numbers of another dtype
    scales,  # [num_rows] fp32
    in_size,
    TILE: tl.constexpr,
):
    """Grid (rows): each row of x as codes of int8 and a scale of its own, as `encode` in pool_view.py."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    peaks, poison = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, in_size, TILE):
        k = start + columns
        values = tl.load(x + row * in_size + k, mask=k < in_size, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(values))
        poison += values * 0.0  # NaN where a value is NaN or infinite
    peak, harm = tl.max(peaks, 0), tl.sum(poison, 0)
    peak_row, harm_row = tl.full([1], 0.0, tl.float32) + peak, tl.full([1], 0.0, tl.float32) + harm
    scale = harm_row
    for start in range(0, in_size, TILE):
        k = start + columns
        values = tl.load(x + row * in_size + k, mask=k < in_size, other=0.0).to(tl.float32)
        found, scale = encoded(values[None, :], peak_row, harm_row, tl.int8)
        kept = found.to(codes.dtype.element_ty)
        tl.store(codes + row * in_size + k[None, :], kept, mask=(k < in_size)[None, :])
    tl.store(scales + row + tl.arange(0, 1), scale)


@triton.jit(do_not_specialize=["num_rows"])
def scale_sums(
    sums,  # [num_rows, out_size] int32
    row_scales,  # [num_rows] fp32
    scales,  # [out_size] fp32
    bias,  # [out_size] or None
    output,  # [num_rows, out_size]
    num_rows,
    out_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (out tiles, row tiles): sums of products of codes, scaled."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    places = rows.to(tl.int64)[:, None] * out_size + columns[None, :]
    real = (rows < num_rows)[:, None] & (columns < out_size)[None, :]
    found = tl.load(sums + places, mask=real, other=0).to(tl.float32)
    found *= tl.load(scales + columns, mask=columns < out_size, other=0.0)[None, :]
    found *= tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
    if bias is not None:
        found += tl.load(bias + columns, mask=columns < out_size, other=0.0).to(tl.float32)[None, :]
    tl.store(output + places, found.to(output.dtype.element_ty), mask=real)
