"""Settings of placement, a part of the router's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, create_model, model_validator

from services.router.placement.disaggregation import Thresholds
from services.router.placement.policy import PlacementConfig
from services.router.placement.scorers.registry import SCORERS
from services.router.placement.scorers.scorer import TierWeights
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
    tier_local: float = Field(default=1.0, ge=0, le=1)
    """Value of a prompt token whose KV is in the worker's own pool."""
    tier_peer: float = Field(default=0.5, ge=0, le=1)
    """Value of a prompt token whose KV is in another worker's pool; at most tier_local."""
    tier_store: float = Field(default=0.25, ge=0, le=1)
    """Value of a prompt token whose KV is in the store's host memory or on disk; at most tier_peer."""
    prefill_here_tokens: int = Field(default=0, ge=0)
    """Longest uncached suffix, tokens, that the decode worker prefills itself, without a hand-off. 0 = none."""
    prefill_here_max_tokens: int = Field(default=0, ge=0)
    """The same limit for when the prefill pool is predicted to be slower. 0 = none."""
    prefill_here_gain: float = Field(default=2.0, ge=1)
    """How many times slower it has to be: the decode worker's running batch is delayed too."""
    max_candidates: int = Field(default=32, ge=2)
    """Workers considered for one request; in a larger pool the longest prefix holders and a random sample."""
    min_hit_share: float = Field(default=0.125, ge=0, le=1)
    """A worker's hits count in comparisons if they are at least this share of the prompt. So long prompts without a
    prefix of their own go to all workers, also to those without the blocks that all prompts begin with."""
    tie_margin: float = Field(default=0.1, ge=0, le=1)
    """With several routers: scores within this margin of the best count as equal, and the router's own workers (by a
    hash of the names) go before their equals. With one router only exact ties are drawn."""
    max_sessions: int = Field(default=100_000, ge=0)
    """Number of conversations whose last workers are remembered."""
    explain_requests: int = Field(default=1024, ge=0)
    """Number of requests whose placement `tandem explain` can show; 0 = none."""

    @model_validator(mode="after")
    def _tiers_in_order(self) -> PlacementSettings:
        if not self.tier_local >= self.tier_peer >= self.tier_store:
            raise ValueError("tier_local, tier_peer and tier_store must not grow in that order")
        return self

    def config(self, max_queued_tokens: int) -> PlacementConfig:
        """What `Placement` takes."""
        return PlacementConfig(
            max_queued_tokens=max_queued_tokens,
            patience=self.patience,
            weights={scorer.setting: getattr(self, scorer.setting) for scorer in SCORERS},
            tiers=TierWeights(self.tier_local, self.tier_peer, self.tier_store),
            thresholds=Thresholds(self.prefill_here_tokens, self.prefill_here_max_tokens, self.prefill_here_gain),
            max_candidates=self.max_candidates,
            min_hit_share=self.min_hit_share,
            tie_margin=self.tie_margin,
            max_sessions=self.max_sessions,
            explain=self.explain_requests > 0,
        )
