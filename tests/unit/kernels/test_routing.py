"""Which experts a token chooses: against the rules written out for one token."""

from __future__ import annotations

import math
import random

import pytest
import torch

from shared.kernels.experts.routing import choose_experts
from shared.kernels.experts.rules import Routing

from .routing_case import FAMILIES, ROUTINGS


def chosen(logits: list[float], bias: list[float] | None, routing: Routing) -> dict[int, float]:
    """Expert → weight of one token."""
    if routing.scoring == "softmax":
        total = math.fsum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    merits = [score + (bias[i] if bias else 0.0) for i, score in enumerate(scores)]
    size = routing.num_experts // routing.num_groups
    groups = [list(range(first, first + size)) for first in range(0, routing.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted((merits[i] for i in group), reverse=True)[: routing.group_score]))
    allowed = [expert for group in groups[: routing.top_groups] for expert in group]
    best = sorted(allowed, key=lambda expert: -merits[expert])[: routing.top_k]
    total = math.fsum(scores[expert] for expert in best) if routing.is_normalised else 1.0
    return {expert: scores[expert] / total * routing.scale for expert in best}


@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_and_weights_follow_the_rules(name: str) -> None:
    routing, rng = ROUTINGS[name], random.Random(name)
    bias = [rng.gauss(0, 0.3) for _ in range(12)] if routing.has_bias else None
    logits = [[rng.gauss(0, 2) for _ in range(12)] for _ in range(50)]
    found = choose_experts(torch.tensor(logits), None if bias is None else torch.tensor(bias), routing)
    for row, ids, weights in zip(logits, found[0].tolist(), found[1].tolist(), strict=True):
        expected = chosen(row, bias, routing)
        assert ids == list(expected)
        assert weights == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_chooses_alike_alone_and_among_others(name: str) -> None:
    routing = ROUTINGS[name]
    logits = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-0.5, 0.5, 12) if routing.has_bias else None
    ids, weights = choose_experts(logits, bias, routing)
    for row in range(40):
        its_ids, its_weights = choose_experts(logits[row : row + 1], bias, routing)
        assert its_ids.equal(ids[row : row + 1])
        # A vector's last lanes may be computed by another function than its first ones.
        torch.testing.assert_close(its_weights, weights[row : row + 1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ROUTINGS | FAMILIES)
def test_of_equal_experts_and_groups_the_first_are_chosen(name: str) -> None:
    routing = (ROUTINGS | FAMILIES)[name]
    logits = torch.full((3, routing.num_experts), 0.25)
    bias = torch.zeros(routing.num_experts) if routing.has_bias else None
    assert choose_experts(logits, bias, routing)[0].tolist() == [list(range(routing.top_k))] * 3
