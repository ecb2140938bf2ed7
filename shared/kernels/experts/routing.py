"""Which experts each token passes, and with what weight: a pure function of the router's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.experts.routing_rules import Routing


def choose_experts(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """See `DecoderOps`: the definition of how experts are chosen.

    1. score = softmax or sigmoid of the logits, in fp32; merit = score + bias (DeepSeek-V3's balance without an
       auxiliary loss, arXiv:2412.19437, section 2.1.2), or the score itself.
    2. Only experts of the `top_groups` best groups can be chosen; a group is as good as the sum of its `group_score`
       best merits (device-limited routing, arXiv:2405.04434, section 2.1.3).
    3. The `top_k` experts of the highest merit are chosen. A weight is the expert's score, over the sum of the chosen
       ones where `is_normalised`, times `scale`.

    Of equal experts the first is chosen, and of equal groups; equal scores come of equal logits, where nothing is added
    to them. NaN is above all numbers.
    """
    check_choose_experts(logits, bias, routing)
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    has_groups = routing.top_groups < routing.num_groups
    if bias is None and (not has_groups or routing.group_score == 1):
        merits = logits  # in the order of the scores, and no two of them were rounded to one
    else:
        merits = scores if bias is None else scores + bias
    if has_groups:
        merits = _within_groups(merits, routing)
    expert_ids = _best(merits, routing.top_k)[1]
    weights = scores.gather(1, expert_ids)
    if routing.is_normalised:
        # What DeepSeek adds so that no sum of sigmoids is zero; a sum of the best softmaxes never is.
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if routing.scoring == "sigmoid" else total)
    return expert_ids, weights * routing.scale if routing.scale != 1.0 else weights


def check_choose_experts(logits: Tensor, bias: Tensor | None, routing: Routing) -> None:
    """Assert what `DecoderOps.choose_experts` asks of its arguments."""
    assert logits.dim() == 2
    assert logits.shape[1] == routing.num_experts, f"{logits.shape[1]} logits of {routing.num_experts} experts"
    assert (bias is not None) == routing.has_bias
    if bias is not None:
        assert bias.shape == (routing.num_experts,)
        assert bias.dtype == torch.float32


def _within_groups(merits: Tensor, routing: Routing) -> Tensor:
    """[num_tokens, num_experts] with -inf for the experts of groups that a token does not choose from."""
    grouped = merits.view(merits.shape[0], routing.num_groups, routing.num_experts // routing.num_groups)
    group_merits = _best(grouped, routing.group_score)[0].sum(-1)
    chosen = _best(group_merits, routing.top_groups)[1]
    banned = torch.ones_like(group_merits, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(banned[..., None], float("-inf")).view(merits.shape)


def _best(merits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, indices) of the `count` highest in the last dimension, the first of equal ones first: torch's own top-k
    leaves open which it takes."""
    values, indices = merits.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]
