"""Placement: first the decode worker, then a prefill worker or none; in collocated mode one worker does both."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul

from services.router.placement.candidates import candidates
from services.router.placement.decision import Candidate, Choice
from services.router.placement.disaggregation import Route, Thresholds
from services.router.placement.prediction import TtftPredictor
from services.router.placement.scorers.decode_load import can_hold, decode_load
from services.router.placement.scorers.prefill_load import has_turn, prefill_load
from services.router.placement.scorers.prefix import TierWeights, prefix_hit
from services.router.placement.scorers.session import SessionTable, stickiness
from services.router.placement.scorers.topology import nearness
from services.router.placement.views import PlacementRequest, Pool, WorkerView


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each scorer counts; a worker's score is their weighted mean. 0 leaves a scorer out."""

    prefill_load: float = 1.0
    prefix: float = 1.0
    topology: float = 0.1
    session: float = 0.1
    decode_load: float = 1.0
    decode_prefix: float = 1.0
    """The prefix that a decode worker holds: blocks that need not travel."""
    decode_session: float = 0.1


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Weights and limits."""

    max_queued_tokens: int = 2048
    """A prefill worker gets more work while it has fewer tokens than this to compute."""
    patience: float = 1.0
    """... and while it has fewer than that and so many times the tokens of the prompt that it holds."""
    weights: Weights = field(default_factory=Weights)
    tiers: TierWeights = field(default_factory=TierWeights)
    thresholds: Thresholds = field(default_factory=Thresholds)
    max_candidates: int = 32
    """Workers looked at; of a larger pool the best prefix holders, the rest drawn at random."""
    min_hit_share: float = 0.125
    """Hits of a smaller share of the prompt do not count when workers are compared. Else one that lacks the few blocks
    with which all prompts begin would get none while others have room, and its pool would keep nobody's prefix."""
    tie_margin: float = 0.1
    """Scores that are so little below the best count as equal where other routers place requests too."""
    max_sessions: int = 100_000
    """Sessions whose last workers are remembered."""
    explain: bool = True
    """Keep every candidate's scores in the choice."""


Scorer = tuple[str, float, Callable[[WorkerView], float]]


class Placement:
    """Chooses workers. Deterministic for a given seed and order of calls."""

    def __init__(self, config: PlacementConfig, seed: int = 0, predictor: TtftPredictor | None = None) -> None:
        self._config = config
        self._random = random.Random(seed)
        self.predictor = predictor or TtftPredictor()
        """What it knows of prefill times; whoever sees first tokens feeds it."""
        self._sessions = SessionTable(config.max_sessions)

    def choose(self, need: PlacementRequest, decodes: Pool, prefills: Pool, *, collocated: bool) -> Choice | None:
        """None where no worker can start the request now. Remembers the session's workers."""
        last_prefill, last_decode = self._sessions.last(need.session)
        choice = (
            self._collocated(need, decodes, last_decode)
            if collocated
            else self._two_pools(need, decodes, prefills, last_prefill, last_decode)
        )
        if choice is not None:
            self._sessions.note(need.session, choice.prefill or "", choice.decode)
        return choice

    def _collocated(self, need: PlacementRequest, decodes: Pool, last: str) -> Choice | None:
        limit = self._config.max_queued_tokens
        found = candidates(
            decodes,
            lambda view: can_hold(view, need) and has_turn(view, need, limit, self._config.patience),
            need.hits.holders,
            last,
            self._config.max_candidates,
            self._random,
        )
        weights = self._config.weights
        scorers = [*self._decode_scorers(need, last), self._prefill_load(need, weights.prefill_load)]
        decode, ranked = self._pick(found, scorers, need)
        if decode is None:
            return None
        return Choice(decode.name, None, Route.COLLOCATED, self.predictor.here_s(decode, need), ranked)

    def _two_pools(
        self, need: PlacementRequest, decodes: Pool, prefills: Pool, last_prefill: str, last_decode: str
    ) -> Choice | None:
        config, holders = self._config, need.hits.holders
        found = candidates(
            decodes, lambda view: can_hold(view, need), holders, last_decode, config.max_candidates, self._random
        )
        decode, ranked_decodes = self._pick(found, self._decode_scorers(need, last_decode), need)
        if decode is None:
            return None
        found = candidates(
            prefills,
            lambda view: has_turn(view, need, config.max_queued_tokens, config.patience),
            holders,
            last_prefill,
            config.max_candidates,
            self._random,
        )
        found = self._in_time(found, need)
        prefill, ranked_prefills = self._pick(found, self._prefill_scorers(need, last_prefill, decode.label), need)
        route, predicted_s = self._route(need, decode, prefill, num_prefills=len(prefills))
        if route is Route.HAND_OFF and prefill is None:
            return None
        name = prefill.name if prefill is not None and route is Route.HAND_OFF else None
        return Choice(decode.name, name, route, predicted_s, ranked_decodes, ranked_prefills)

    def _in_time(self, views: list[WorkerView], need: PlacementRequest) -> list[WorkerView]:
        """Those that are predicted to meet the deadline; all of them where none is."""
        if math.isinf(need.slack_s):
            return views
        return [view for view in views if (self.predictor.pool_s(view, need) or 0.0) <= need.slack_s] or views

    def _route(
        self, need: PlacementRequest, decode: WorkerView, prefill: WorkerView | None, *, num_prefills: int
    ) -> tuple[Route, float | None]:
        """Where the prompt is computed, and the predicted seconds to its first token."""
        thresholds = self._config.thresholds
        pool_s = self.predictor.pool_s(prefill, need) if prefill is not None else math.inf
        # Another router's decode worker may be given a prompt by each of us in the same moment: short ones at most.
        most = max(thresholds.short_suffix_tokens, thresholds.max_here_tokens if decode.in_shard else 0)
        num_uncached = need.num_uncached_tokens(decode.name)
        if not num_prefills or decode.num_queued_tokens + num_uncached > most:
            return Route.HAND_OFF, pool_s  # it has enough to prefill already
        here_s = self.predictor.here_s(decode, need)
        route = thresholds.route(num_uncached, here_s, pool_s)
        return route, pool_s if route is Route.HAND_OFF else here_s

    def _least_hit(self, need: PlacementRequest) -> float:
        """Tokens of the shortest hit that counts when workers are compared."""
        return self._config.min_hit_share * need.num_tokens

    def _decode_scorers(self, need: PlacementRequest, last: str) -> list[Scorer]:
        weights, tiers = self._config.weights, TierWeights(1.0, 0.0, 0.0)  # a decode worker fetches from nowhere
        least = self._least_hit(need)
        scorers: list[Scorer] = [("load", weights.decode_load, lambda view: decode_load(view, need, least))]
        if need.hits.local:
            scorers.append(("prefix", weights.decode_prefix, lambda view: prefix_hit(view, need, tiers, least)))
        if last:
            scorers.append(("session", weights.decode_session, lambda view: stickiness(view, last)))
        return scorers

    def _prefill_scorers(self, need: PlacementRequest, last: str, near: tuple[str, ...]) -> list[Scorer]:
        weights, tiers, hits = self._config.weights, self._config.tiers, need.hits
        least = self._least_hit(need)
        scorers = [self._prefill_load(need, weights.prefill_load)]
        if hits.local or hits.store:
            scorers.append(("prefix", weights.prefix, lambda view: prefix_hit(view, need, tiers, least)))
        if near:
            scorers.append(("topology", weights.topology, lambda view: nearness(view, near)))
        if last:
            scorers.append(("session", weights.session, lambda view: stickiness(view, last)))
        return scorers

    def _prefill_load(self, need: PlacementRequest, weight: float) -> Scorer:
        scale = max(need.num_tokens, self._config.max_queued_tokens)
        least = self._least_hit(need)
        return ("queue", weight, lambda view: prefill_load(view, need, scale, least))

    def _pick(
        self, views: Sequence[WorkerView], scorers: Sequence[Scorer], need: PlacementRequest
    ) -> tuple[WorkerView | None, tuple[Candidate, ...]]:
        """The best by the weighted mean; equals are drawn, this router's own before others."""
        if not views:
            return None, ()
        scorers = [scorer for scorer in scorers if scorer[1] > 0]
        total = sum(weight for _, weight, _ in scorers) or 1.0
        parts = [[score(view) for _, _, score in scorers] for view in views]
        weights = [weight for _, weight, _ in scorers]
        scores = [sum(map(mul, weights, part)) / total for part in parts]
        alone = all(view.in_shard for view in views)
        enough = max(scores) - (0.0 if alone else self._config.tie_margin)
        equals = [view for view, value in zip(views, scores, strict=True) if value >= enough]
        chosen = self._random.choice([view for view in equals if view.in_shard] or equals)
        if not self._config.explain:
            return chosen, ()
        names = [name for name, _, _ in scorers]
        ranked = sorted(zip(scores, views, parts, strict=True), key=lambda entry: -entry[0])
        return chosen, tuple(
            Candidate(
                view.name,
                value,
                tuple(zip(names, part, strict=True)),
                view.num_queued_tokens,
                view.num_free_blocks,
                view.num_requests,
                need.num_hit_tokens(view.name),
            )
            for value, view, part in ranked[: self._config.max_candidates]
        )
