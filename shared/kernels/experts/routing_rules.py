"""The rules by which a model's router chooses. No tensors: reading a configuration needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts.

    Its creator has checked that `num_groups` divides `num_experts`, and that the groups which a token chooses from have
    at least `top_k` experts and each group `group_score` of them.
    """

    num_experts: int
    top_k: int  # experts of a token
    scoring: Scoring
    is_normalised: bool  # whether a token's weights add up to one, before the scale
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # of neighbouring experts, equally many in each
    top_groups: int = 1  # groups that a token chooses from
    group_score: int = 1  # a group's score is the sum of this many of its best experts' scores
    has_bias: bool = False  # whether the choice, not the weight, follows score + bias
