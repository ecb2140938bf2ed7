"""Settings of placement, a part of the router's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field, create_model, model_validator

from services.router.placement.decision import Thresholds
from services.router.placement.policy import PlacementConfig
from services.router.placement.scorers import SCORERS, TierWeights
from shared.settings.group import SettingGroup

if TYPE_CHECKING:

    class ScorerWeights(SettingGroup):
        """A weight for each scorer of the registry."""
else:
    ScorerWeights = create_model(
        "ScorerWeights",
        __base__=SettingGroup,
        **{
            scorer.setting: (float, Field(default=scorer.default_weight, ge=0, description=scorer.doc))
            for scorer in SCORERS
        },
    )


class PlacementSettings(ScorerWeights):
    """Weights of the scorers (a worker's score is the scorers' weighted mean, weight 0 leaves one out) and limits."""

    patience: float = Field(default=1.0, ge=0, le=100)
    """A prefill worker that holds part of the prompt may have a longer queue, by patience × hit tokens."""
    tier_peer: float = Field(default=0.5, ge=0, le=1)
    """Value of a prompt token whose KV is in another worker's pool; in the worker's own it is 1."""
    tier_store: float = Field(default=0.25, ge=0, le=1)
    """Value of a prompt token whose KV is in the store's host memory or on disk; at most tier_peer."""
    prefill_here_tokens: int = Field(default=0, ge=0)
    """Longest uncached suffix, tokens, that the decode worker prefills itself, without a hand-off. 0 = none."""
    prefill_here_max_tokens: int = Field(default=0, ge=0)
    """The same limit for when the prefill pool is predicted to be slower. 0 = none."""

    @model_validator(mode="after")
    def _tiers_in_order(self) -> PlacementSettings:
        if self.tier_store > self.tier_peer:
            raise ValueError("tier_store must not be above tier_peer")
        return self

    def config(self, max_queued_tokens: int, ttft_target_s: float = 0.0, tpot_target_s: float = 0.0) -> PlacementConfig:
        """What `Placement` takes; targets in seconds, 0 = none."""
        return PlacementConfig(
            max_queued_tokens=max_queued_tokens,
            patience=self.patience,
            weights={scorer.setting: getattr(self, scorer.setting) for scorer in SCORERS},
            tiers=TierWeights(peer=self.tier_peer, store=self.tier_store),
            thresholds=Thresholds(self.prefill_here_tokens, self.prefill_here_max_tokens),
            ttft_target_s=ttft_target_s or math.inf,
            tpot_target_s=tpot_target_s or math.inf,
        )
