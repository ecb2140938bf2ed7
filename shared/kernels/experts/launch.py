"""Launcher of Triton's experts: the pairs of tokens and experts are sorted on the device, without synchronization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.activation.launch import constants
from shared.kernels.activation.rules import SILU, Activation
from shared.kernels.device import DeviceLimits, next_power_of_2
from shared.kernels.experts.jit import combine_tiles, down_tiles, gate_up_tiles
from shared.kernels.experts.reference import PlainExperts, check_forward

COMBINED = 1024
"""Elements of a token that a program of the combination takes."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes that a launch is compiled for."""

    rows: int  # of an expert
    columns: int
    depth: int  # k of a step
    num_warps: int
    num_stages: int


def experts_config(pairs_an_expert: float, dtype: torch.dtype, limits: DeviceLimits) -> ExpertsConfig:
    """Tiles of 16 rows where an expert has few in the mean, else of 64, the fewest that a warpgroup multiplies."""
    if dtype == torch.float32:  # for tests of exactness
        return ExpertsConfig(rows=16, columns=32, depth=32, num_warps=4, num_stages=2)
    num_stages = 3 if limits.shared_bytes > 64 * 1024 else 2
    if pairs_an_expert <= 16:
        return ExpertsConfig(rows=16, columns=64, depth=64, num_warps=4, num_stages=num_stages)
    return ExpertsConfig(rows=64, columns=64, depth=64, num_warps=4, num_stages=num_stages)


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
    if first_expert == 0:  # as where one process has all experts: one launch instead of five
        local = expert_ids.clamp(max=num_experts)
    else:
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
        most_tiles=len(pairs) // tile_rows + min(num_experts, len(pairs)),
    )


class GroupedExperts(PlainExperts):
    """See `Experts`; its weights are the caller's, neither copied nor changed."""

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        num_experts, hidden, inner = self.down.shape
        check_forward(x, expert_ids, weights, hidden)
        assert x.dtype == self.down.dtype, f"{x.dtype} times {self.down.dtype}"
        num_tokens, top_k = expert_ids.shape
        output = torch.empty_like(x)
        if num_tokens == 0:
            return output
        num_pairs = num_tokens * top_k
        config = experts_config(num_pairs / num_experts, x.dtype, devices.device_limits(x.device))
        pairs = sort_pairs(expert_ids, self.first_expert, num_experts, config.rows)
        sizes = {
            "NUM_EXPERTS": num_experts,
            "EXPERTS": next_power_of_2(num_experts),
            "ROWS": config.rows,
            "COLUMNS": config.columns,
            "DEPTH": config.depth,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        where = (pairs.order, pairs.row_ends, pairs.tile_ends)
        activated, found = x.new_empty((num_pairs, inner)), x.new_empty((num_pairs, hidden))
        gate_up_tiles[(-(-inner // config.columns), pairs.most_tiles)](
            x, self.gate_up, *where, activated, hidden, inner, TOP_K=top_k, **sizes, **constants(self.activation)
        )
        down_tiles[(-(-hidden // config.columns), pairs.most_tiles)](
            activated, self.down, *where, found, inner, hidden, **sizes
        )
        combine_tiles[(-(-hidden // COMBINED), num_tokens)](
            found,
            pairs.local_ids,
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
    return GroupedExperts(gate_up, down, first_expert, activation)
