"""Which experts each token passes, and with what weight: a pure function of the router's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.experts.rules import Routing


def choose_experts(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each token; a token's choice depends on its own logits alone.

    1. score = softmax or sigmoid of the logits; merit = score + bias (DeepSeek-V3's balance without an auxiliary loss,
       arXiv:2412.19437, section 2.1.2), or the score itself.
    2. Only experts of the `top_groups` best groups can be chosen; a group is as good as the sum of its `group_score`
       best merits (device-limited routing, arXiv:2405.04434, section 2.1.3).
    3. The `top_k` experts of the highest merit are chosen. A weight is the expert's score, over the sum of the chosen
       ones where `is_normalised`, times `scale`.

    Args:
        logits: [num_tokens, num_experts] fp32.
        bias: [num_experts] fp32, or None where not `has_bias`.
        routing: how to choose.

    Returns:
        (expert_ids [num_tokens, top_k] int64, weights [num_tokens, top_k] fp32), the best first.
    """
    assert logits.dtype == torch.float32
    assert logits.shape[1] == routing.num_experts, f"{logits.shape[1]} logits of {routing.num_experts} experts"
    assert (bias is not None) == routing.has_bias
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    merits = scores if bias is None else scores + bias
    if routing.top_groups < routing.num_groups:
        merits = _within_groups(merits, routing)
    best, expert_ids = merits.topk(routing.top_k, dim=-1)
    weights = best if bias is None else scores.gather(1, expert_ids)
    if routing.is_normalised:
        # What DeepSeek adds so that no sum of sigmoids is zero; a sum of the best softmaxes never is.
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if routing.scoring == "sigmoid" else total)
    return expert_ids, weights * routing.scale if routing.scale != 1.0 else weights


def _within_groups(merits: Tensor, routing: Routing) -> Tensor:
    """[num_tokens, num_experts] with -inf for the experts of groups that a token does not choose from."""
    grouped = merits.view(merits.shape[0], routing.num_groups, -1)
    group_merits = grouped.topk(routing.group_score, dim=-1).values.sum(-1)
    chosen = group_merits.topk(routing.top_groups, dim=-1).indices
    banned = torch.ones_like(group_merits, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(banned[..., None], float("-inf")).view(merits.shape)
