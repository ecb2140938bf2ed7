"""Launcher of Triton's experts: the pairs of tokens and experts are sorted on the device, without synchronization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.activation.activations import SILU, Activation
from shared.kernels.activation.launch import act_and_mul, constants
from shared.kernels.device import DeviceLimits, next_power_of_2
from shared.kernels.experts.jit import combine_tiles, down_tiles, gate_up_tiles, sort_pairs_here
from shared.kernels.experts.reference import PlainExperts, check_experts, check_forward
from shared.kernels.lora.step import StepExpertLoras

COMBINED = 1024
"""Elements of a token that a program of the combination takes."""
COMPARED_PAIRS = 4096
"""Pairs that are sorted in one launch, by comparing each with all others; torch's sort takes a dozen."""
BLOCK, CHUNK = 32, 256
"""Pairs of a program of that sort, and those that it compares them with at once."""
TORCH_PAIRS = 1024
"""Pairs an expert in the mean beyond which torch's grouped product serves; see `suits_torch`. On an H100 the tiles have
1.06 times its rate with 512 pairs, and 0.93 of it with 2,048."""


@dataclass(frozen=True)
class ProductConfig:
    """Sizes that a product's kernel is compiled for."""

    columns: int
    depth: int  # k of a step
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of both products."""

    rows: int  # of an expert
    group: int  # row tiles that share a column tile
    gate_up: ProductConfig  # its columns are of each of the two
    down: ProductConfig


def experts_config(pairs_an_expert: float, dtype: torch.dtype, limits: DeviceLimits) -> ExpertsConfig:
    """Tiles of 16 rows where an expert has few in the mean, else of 64, the fewest that a warpgroup multiplies, or of
    128 for two warpgroups."""
    if dtype == torch.float32:  # for tests of exactness
        product = ProductConfig(columns=32, depth=32, num_warps=4, num_stages=2)
        return ExpertsConfig(16, 1, product, product)
    product = ProductConfig(columns=64, depth=64, num_warps=4, num_stages=3 if limits.shared_bytes > 64 * 1024 else 2)
    if pairs_an_expert <= 16:
        return FEW_ROWS if limits.arch == "sm_90" else ExpertsConfig(16, 1, product, product)
    if pairs_an_expert < 64 or limits.arch != "sm_90":
        return ExpertsConfig(64, 8, product, product)
    return MANY_ROWS


FEW_ROWS = ExpertsConfig(16, 1, ProductConfig(32, 128, 4, 4), ProductConfig(64, 128, 4, 4))
"""For compute capability 9.0, as the next: what was quickest on an H100 of those that `kernels --tune` has."""
MANY_ROWS = ExpertsConfig(128, 8, ProductConfig(128, 64, 8, 4), ProductConfig(256, 64, 8, 4))
"""For compute capability 9.0: sums of 128 registers a thread, 48 KiB of shared memory a stage."""


@dataclass(frozen=True, eq=False)
class SortedPairs:
    """The pairs of a token and an expert, those of an expert together, and tiles of them."""

    local_ids: Tensor  # [num_tokens, top_k] int64, the number of experts where another range has the expert
    order: Tensor  # [num_tokens * top_k] int64, sorted row → pair
    row_ends: Tensor  # [num_experts] int32
    tile_ends: Tensor  # [num_experts] int32
    most_tiles: int  # whatever the choice


def sort_pairs(expert_ids: Tensor, first_expert: int, num_experts: int, tile_rows: int) -> SortedPairs:
    """On the device of `expert_ids` [num_tokens, top_k] int64, without waiting for it."""
    num_pairs = expert_ids.numel()
    most_tiles = num_pairs // tile_rows + min(num_experts, num_pairs)
    if num_pairs <= COMPARED_PAIRS:
        return _sort_by_comparing(expert_ids.contiguous(), first_expert, num_experts, tile_rows, most_tiles)
    local = expert_ids - first_expert
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    pairs = local.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(0, pairs, torch.ones_like(pairs))
    counts = counts[:num_experts]
    return SortedPairs(
        local,
        torch.argsort(pairs, stable=True),
        row_ends=counts.cumsum(0, dtype=torch.int32),
        tile_ends=((counts + tile_rows - 1) // tile_rows).cumsum(0, dtype=torch.int32),
        most_tiles=most_tiles,
    )


def _sort_by_comparing(
    expert_ids: Tensor, first_expert: int, num_experts: int, tile_rows: int, most_tiles: int
) -> SortedPairs:
    num_pairs = expert_ids.numel()
    local_ids, order = torch.empty_like(expert_ids), expert_ids.new_empty(num_pairs)
    ends = torch.empty((2, num_experts), dtype=torch.int32, device=expert_ids.device)
    sort_pairs_here[(-(-num_pairs // BLOCK),)](
        expert_ids,
        local_ids,
        order,
        ends[0],
        ends[1],
        first_expert,
        num_pairs,
        NUM_EXPERTS=num_experts,
        BINS=next_power_of_2(num_experts + 1),
        ROWS=tile_rows,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return SortedPairs(local_ids, order, ends[0], ends[1], most_tiles)


def suits_torch(pairs_an_expert: float, down: Tensor, limits: DeviceLimits) -> bool:
    """Whether `torch.nn.functional.grouped_mm` computes these products without asking the device for sizes, and faster
    than Triton's tiles. Elsewhere than on compute capability 9.0 it may wait; its rows begin at multiples of 16 bytes.

    Args:
        pairs_an_expert: in the mean.
        down: [num_experts, hidden, inner].
        limits: of the device.
    """
    is_served = limits.arch == "sm_90" and down.dtype == torch.bfloat16
    return is_served and pairs_an_expert > TORCH_PAIRS and down.shape[1] % 8 == down.shape[2] % 8 == 0


class GroupedExperts(PlainExperts):
    """See `Experts`; its weights are the caller's, neither copied nor changed."""

    gate_up: Tensor
    down: Tensor

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, loras: StepExpertLoras | None = None) -> Tensor:
        """See `Experts`. With additions the experts are computed one after the other: these tiles activate at once what
        the additions belong to."""
        if loras is not None:
            return super().forward(x, expert_ids, weights, loras)
        num_experts = self.down.shape[0]
        limits = devices.device_limits(x.device)
        pairs_an_expert = expert_ids.numel() / num_experts
        if suits_torch(pairs_an_expert, self.down, limits):
            return self.by_torch(x, expert_ids, weights)
        return self.by_tiles(x, expert_ids, weights, experts_config(pairs_an_expert, x.dtype, limits))

    def by_tiles(self, x: Tensor, expert_ids: Tensor, weights: Tensor, config: ExpertsConfig) -> Tensor:
        """`forward` with Triton's products of these sizes."""
        num_experts, hidden, inner = self._check(x, expert_ids, weights)
        num_tokens, top_k = expert_ids.shape
        if num_tokens == 0:
            return torch.empty_like(x)
        pairs = sort_pairs(expert_ids, self.first_expert, num_experts, config.rows)
        activated, found = x.new_empty((num_tokens * top_k, inner)), x.new_empty((num_tokens * top_k, hidden))
        where = (pairs.order, pairs.row_ends, pairs.tile_ends)
        sizes = {
            "NUM_EXPERTS": num_experts,
            "EXPERTS": next_power_of_2(num_experts),
            "ROWS": config.rows,
            "GROUP": config.group,
        }
        gate_up_tiles[(pairs.most_tiles * -(-inner // config.gate_up.columns),)](
            x,
            self.gate_up,
            *where,
            activated,
            hidden,
            inner,
            pairs.most_tiles,
            TOP_K=top_k,
            **sizes,
            **_sizes(config.gate_up, hidden),
            **constants(self.activation),
        )
        down_tiles[(pairs.most_tiles * -(-hidden // config.down.columns),)](
            activated,
            self.down,
            *where,
            found,
            inner,
            hidden,
            pairs.most_tiles,
            **sizes,
            **_sizes(config.down, inner),
        )
        return _combine(found, None, pairs.local_ids, weights, num_experts)

    def by_torch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """`forward` with torch's grouped products of all pairs' rows, sorted by expert. Rows past the last expert's are
        undefined in them."""
        num_experts, _, _ = self._check(x, expert_ids, weights)
        top_k = expert_ids.shape[1]
        pairs = sort_pairs(expert_ids, self.first_expert, num_experts, 1)
        rows = x.index_select(0, pairs.order // top_k)
        both = torch.nn.functional.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=pairs.row_ends)
        found = torch.nn.functional.grouped_mm(
            act_and_mul(both, self.activation), self.down.transpose(1, 2), offs=pairs.row_ends
        )
        places = torch.empty_like(pairs.order)
        places.scatter_(0, pairs.order, torch.arange(len(places), device=places.device))
        return _combine(found, places, pairs.local_ids, weights, num_experts)

    def _check(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[int, int, int]:
        num_experts, hidden, inner = self.down.shape
        check_forward(x, expert_ids, weights, hidden)
        assert x.dtype == self.down.dtype, f"{x.dtype} times {self.down.dtype}"
        return num_experts, hidden, inner


def _sizes(product: ProductConfig, depth: int) -> dict[str, int | bool]:
    """Compile-time constants of a product over `depth`."""
    return {
        "COLUMNS": product.columns,
        "DEPTH": product.depth,
        "EVEN": depth % product.depth == 0,
        "num_warps": product.num_warps,
        "num_stages": product.num_stages,
    }


def _combine(found: Tensor, rows: Tensor | None, local_ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """[num_tokens, hidden]: see `combine_tiles`."""
    num_tokens, top_k = local_ids.shape
    hidden = found.shape[1]
    output = found.new_empty((num_tokens, hidden))
    combine_tiles[(num_tokens, -(-hidden // COMBINED))](
        found,
        rows,
        local_ids,
        weights.contiguous(),
        output,
        hidden,
        TOP_K=top_k,
        NUM_EXPERTS=num_experts,
        TILE=COMBINED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return output


def make_grouped_experts(
    gate_up: Tensor,
    down: Tensor,
    first_expert: int,
    *,
    own: bool,  # noqa: ARG001
    activation: Activation = SILU,
) -> GroupedExperts:
    """`DecoderOps.make_experts` of Triton's backends."""
    check_experts(gate_up, down)
    return GroupedExperts(gate_up, down, first_expert, activation)
