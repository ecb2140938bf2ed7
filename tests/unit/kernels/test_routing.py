"""Which experts a token chooses: against the rules written out for one token."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from shared.kernels.experts.routing import choose_experts
from shared.kernels.experts.rules import Routing

PLAIN = Routing(num_experts=12, top_k=3, scoring="softmax", is_normalised=False)
ROUTINGS = {
    "softmax": PLAIN,
    "normalised": replace(PLAIN, is_normalised=True),
    "all experts": replace(PLAIN, top_k=12, is_normalised=True),
    "one expert": replace(PLAIN, top_k=1, is_normalised=True),
    "groups": replace(PLAIN, num_groups=4, top_groups=2, scale=16.0),
    "sigmoid": replace(PLAIN, scoring="sigmoid", num_groups=3, top_groups=2, group_score=2, scale=2.5, has_bias=True),
    "sigmoid, normalised": Routing(12, 3, "sigmoid", True, 2.5, 4, 3, 2, True),
}


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
