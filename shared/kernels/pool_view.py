"""A pool as kernels take it: its bytes, and how keys and values lie in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.layout import SCALE_BYTES, BlockLayout

CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""dtypes of codes, by the largest that they use: a token's scale makes its largest element that one."""
KV_DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16, *CODES),
    torch.bfloat16: (torch.bfloat16, *CODES),
    torch.float16: (torch.float16,),
}
"""Compute dtype → KV dtypes. K and V are rounded once, when they are written, and widened when they are read."""
LEAST_PEAK = 2.0**-100
"""A token's elements of one head that are all smaller are kept as zeros: the inverse of their scale would overflow."""


@dataclass(frozen=True, eq=False, slots=True)
class PoolView:
    """A contiguous pool, or some adjacent layers and heads of it."""

    memory: Tensor  # [num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8
    dtype: torch.dtype  # of K and V
    block_size: int  # tokens
    head_dim: int

    def __post_init__(self) -> None:
        assert self.memory.dtype == torch.uint8
        assert self.memory.dim() == 5
        assert self.num_planes in (1, 2)
        assert self.memory.shape[4] == self.block_size * (
            self.head_dim * self.dtype.itemsize + SCALE_BYTES * self.has_scales
        )
        _, of_layer, of_plane, of_head, of_byte = self.memory.stride()
        assert (of_byte, of_head) == (1, self.memory.shape[4]), "a head of a block is strided"
        assert of_layer == self.num_planes * of_plane, "the pool is strided"

    @classmethod
    def of(cls, memory: Tensor, layout: BlockLayout) -> PoolView:
        """memory: [num_blocks, …] of whole blocks of `layout`."""
        shape = layout.shape(memory.shape[0])
        dtype: torch.dtype = getattr(torch, layout.dtype)
        return cls(memory.view(shape), dtype, layout.block_size, layout.format.head_dim)

    @classmethod
    def over(cls, rows: Tensor) -> PoolView:
        """rows: [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim], contiguous, of no codes."""
        return cls(rows.view(torch.uint8).flatten(-2), rows.dtype, *rows.shape[-2:])

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.memory.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers of this view."""
        return self.memory.shape[1]

    @property
    def num_planes(self) -> int:
        """2: keys, then values. 1: a row is both, as latents are."""
        return self.memory.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Heads of this view."""
        return self.memory.shape[3]

    @property
    def has_scales(self) -> bool:
        """Whether K and V are codes."""
        return self.dtype in CODES

    @property
    def rows(self) -> Tensor:
        """[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim] of `dtype`, the same memory."""
        of_rows = self.memory[..., : self.block_size * self.head_dim * self.dtype.itemsize]
        return of_rows.view(self.dtype).view(*self.memory.shape[:4], self.block_size, self.head_dim)

    @property
    def scales(self) -> Tensor:
        """[num_blocks, num_layers, num_planes, num_kv_heads, block_size] fp32, the same memory; of codes only."""
        assert self.has_scales
        return self.memory[..., self.block_size * self.head_dim :].view(torch.float32)

    @property
    def elements(self) -> Tensor:
        """[num_blocks, num_layers, num_planes, num_kv_heads, …]: the memory as numbers of `dtype`, or as codes of int8,
        or uint8 for those of fp8."""
        return self.memory if self.dtype == torch.float8_e4m3fn else self.memory.view(self.dtype)

    @property
    def as_scales(self) -> Tensor | None:
        """[num_words] fp32: all memory of a contiguous pool of codes, some words of which are scales; else None."""
        return self.memory.view(-1).view(torch.float32) if self.has_scales else None

    def part(self, layers: slice, heads: slice) -> PoolView:
        """Adjacent layers and heads of this view."""
        return PoolView(self.memory[:, layers, :, heads], self.dtype, self.block_size, self.head_dim)

    def write(self, plane: int, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Rounds keys, values or latents of some tokens to `dtype`.

        Args:
            plane: 0 for keys, 1 for values.
            layer: 0 <= layer < num_layers.
            slots: [num_tokens] int64, block_id * block_size + offset, no two equal.
            rows: [num_tokens, num_kv_heads, head_dim].
        """
        blocks = torch.div(slots, self.block_size, rounding_mode="floor")
        # Two index tensors with a slice between them: the tokens become the leading dimension of the target.
        places = (blocks, layer, plane, slice(None), slots % self.block_size)
        if not self.has_scales:
            self.rows[places] = rows.to(self.dtype)
            return
        codes, scales = encode(rows, self.dtype)
        self.rows.view(torch.uint8)[places] = codes.view(torch.uint8)
        self.scales[places] = scales

    def blank_broken(self, layer: int, slots: Tensor) -> None:
        """Puts zeros where keys, values or latents of some tokens are NaN or infinite. Arguments as of `write`."""
        blocks = torch.div(slots, self.block_size, rounding_mode="floor")
        places = (blocks, layer, slice(None), slice(None), slots % self.block_size)
        numbers = self.scales if self.has_scales else self.rows  # numbers that are none have no scale
        numbers[places] = numbers[places].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def open(self, runs: Tensor, dtype: torch.dtype) -> Tensor:
        """Runs of single heads, copied from the pool, as numbers: [..., num_runs, head_bytes] uint8 to
        [..., num_runs * block_size, head_dim] of `dtype`."""
        size = self.block_size * self.head_dim * self.dtype.itemsize
        rows = runs[..., :size].contiguous().view(self.dtype).view(*runs.shape[:-1], self.block_size, self.head_dim)
        if self.has_scales:
            rows = rows.float() * runs[..., size:].contiguous().view(torch.float32)[..., None]
        return rows.flatten(-3, -2).to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as torch names it, such as bfloat16: as layouts, fingerprints and configurations have it."""
    return str(dtype).removeprefix("torch.")


def encode(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of some tokens' heads, each from its own numbers alone: `code * scale` is about the number.

    Args:
        rows: [..., head_dim].
        dtype: one of `CODES`.

    Returns:
        (codes [..., head_dim] of `dtype`, scales [...] fp32). Infinite and NaN rows have a scale of NaN.
    """
    rows = rows.float()
    peaks = rows.abs().amax(-1)
    most = torch.full_like(
        peaks, CODES[dtype]
    )  # not a number: torch would multiply by an inverse, which rounds otherwise
    is_usual = peaks.isfinite() & (peaks >= LEAST_PEAK)
    scaled = torch.where(is_usual[..., None], rows * (most / peaks)[..., None], 0.0)
    if dtype == torch.int8:
        scaled = scaled.round()
    scales = torch.where(is_usual, peaks / most, torch.where(peaks.isfinite(), 0.0, torch.nan))
    return scaled.to(dtype), scales


def assert_kv_dtype(compute: torch.dtype, kv: torch.dtype) -> None:
    """For kernels, whose callers have checked it before."""
    assert kv in KV_DTYPES[compute], f"KV in {kv} beside {compute}"
