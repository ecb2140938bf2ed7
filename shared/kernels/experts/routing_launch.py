"""Launcher of Triton's choice of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.device import next_power_of_2
from shared.kernels.experts.routing import check_choose_experts
from shared.kernels.experts.routing_jit import choose_of_token
from shared.kernels.experts.routing_rules import Routing


def choose_experts(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """`DecoderOps.choose_experts`."""
    check_choose_experts(logits, bias, routing)
    assert logits.stride(1) == 1
    assert bias is None or bias.is_contiguous()
    num_tokens = logits.shape[0]
    expert_ids = torch.empty((num_tokens, routing.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return expert_ids, weights
    # Without a choice of groups they are one: the experts in a row.
    num_groups = routing.num_groups if routing.top_groups < routing.num_groups else 1
    of_group = routing.num_experts // num_groups
    choose_of_token[(num_tokens,)](
        logits,
        bias,
        expert_ids,
        weights,
        logits.stride(0),
        routing.scale,
        TOP_K=routing.top_k,
        CHOSEN=next_power_of_2(routing.top_k),
        NUM_GROUPS=num_groups,
        GROUPS=next_power_of_2(num_groups),
        OF_GROUP=of_group,
        MEMBERS=next_power_of_2(of_group),
        TOP_GROUPS=min(routing.top_groups, num_groups),
        GROUP_SCORE=routing.group_score,
        IS_SOFTMAX=routing.scoring == "softmax",
        IS_NORMALISED=routing.is_normalised,
        num_warps=1,
    )
    return expert_ids, weights
