"""Placement: first the decode worker, then a prefill worker or none; in collocated mode one worker does both."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from operator import mul
from typing import TYPE_CHECKING, get_args

from services.router.placement.adapter_sets import AdapterSets
from services.router.placement.decision import Candidate, Choice, Ranking, Route, Thresholds
from services.router.placement.filters import Filter, can_hold, candidates, has_queue_room
from services.router.placement.pairs import PairPolicy
from services.router.placement.prediction import TtftPredictor
from services.router.placement.scorers import SCORERS, Scorer, ScoringContext, SessionTable, Stage, TierWeights, weights
from services.router.placement.split import SplitController
from services.router.placement.views import PlacementRequest, Pool, WorkerView

if TYPE_CHECKING:
    from shared.settings.common import Mode


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Weights and limits."""

    max_queued_tokens: int = 2048
    """A prefill worker accepts more work while it has fewer queued tokens than this."""
    patience: float = 1.0
    """Extra queue allowance: patience × hit tokens."""
    weights: Mapping[str, float] = field(default_factory=weights)
    """Weight by scorer setting; 0 leaves a scorer out."""
    tiers: TierWeights = field(default_factory=TierWeights)
    thresholds: Thresholds = field(default_factory=Thresholds)
    max_candidates: int = 32
    """Workers considered; in a larger pool the longest prefix holders and a random sample."""
    min_hit_share: float = 0.125
    """Hits of a smaller share of the prompt do not count in comparisons. Otherwise a worker without the few blocks that
    all prompts begin with would get no request while others have room, and its pool would stay empty."""
    tie_margin: float = 0.1
    """Scores within this margin of the best count as equal while other routers place requests too."""
    max_sessions: int = 100_000
    """Sessions whose last workers are remembered."""
    explain: bool = True
    """Keep every candidate's scores in the choice."""
    tpot_target_s: float = math.inf
    """What pairs and the split are chosen by; infinite: none. Seconds."""
    ttft_target_s: float = math.inf
    """What the split is chosen by. Seconds."""


class Placement:
    """Chooses workers. Deterministic for a given seed and order of calls."""

    def __init__(self, config: PlacementConfig, seed: int = 0, predictor: TtftPredictor | None = None) -> None:
        self._config = config
        self._random = random.Random(seed)
        self.predictor = predictor or TtftPredictor()
        """Learnt prefill times; attempts report their first tokens to it."""
        self.split = SplitController(config.tpot_target_s, config.ttft_target_s)
        """Which workers of both roles decode; it counts arrivals and ends."""
        self.pairs = PairPolicy(config.tpot_target_s, self.predictor, self.split.demand)
        """Which two of these serve a request."""
        self._adapters = AdapterSets()
        self._sessions = SessionTable(config.max_sessions)
        self._has_room: Filter = partial(
            has_queue_room, max_queued_tokens=config.max_queued_tokens, patience=config.patience
        )
        self._scorers: dict[Stage, list[tuple[Scorer, float]]] = {
            stage: [
                (scorer, weight)
                for scorer in SCORERS
                if stage in scorer.stages and (weight := config.weights[scorer.setting]) > 0
            ]
            for stage in get_args(Stage)
        }

    @property
    def ttft_target_s(self) -> float:
        """See `PlacementConfig`."""
        return self._config.ttft_target_s

    def choose_by(self, mode: Mode, request: PlacementRequest, decodes: Pool, prefills: Pool) -> Choice | None:
        """None if no worker can start the request now."""
        choice = (
            self.choose_pair(request, decodes, prefills)
            if mode == "auto"
            else self.choose(request, decodes, prefills, collocated=mode == "collocated")
        )
        if choice is not None and math.isfinite(request.now_s):
            self._adapters.placed(request.adapter, request.num_tokens, request.now_s)
        return choice

    def waits_by(self, mode: Mode) -> TtftPredictor | PairPolicy:
        """What predicts for admission how long requests wait; see `WaitPredictor`."""
        return self.pairs if mode == "auto" else self.predictor

    def choose(self, request: PlacementRequest, decodes: Pool, prefills: Pool, *, collocated: bool) -> Choice | None:
        """None if no worker can start the request now. Remembers the session's workers."""
        last_prefill, last_decode = self._sessions.last(request.session)
        choice = (
            self._collocated(request, decodes, last_decode)
            if collocated
            else self._two_pools(request, decodes, prefills, last_prefill, last_decode)
        )
        if choice is not None:
            self._sessions.note(request.session, choice.prefill or "", choice.decode)
        return choice

    def choose_pair(self, request: PlacementRequest, decodes: Pool, prefills: Pool) -> Choice | None:
        """The same, where workers have both roles: for this request any two of them, or one for both parts."""
        judge = self.split.headroom
        judge.gap_s, judge.hand_off_s = self.predictor.gap_s, self.predictor.hand_off_s
        preferred = self.split.decodes(decodes, request.groups, request.now_s)
        patience, pairs = self._config.patience, self.pairs
        pairs.displaced, pairs.delayed, pairs.is_pure = self.split.displaced, self.split.delayed, self.split.is_pure
        pairs.look(prefills, preferred, prefills.version)
        if pairs.typical is None:  # nothing says yet that a hand-off is worth what it takes
            return self.choose(request, decodes, prefills, collocated=True)
        drawn = self._drawn(decodes, prefills)

        def may_prefill(view: WorkerView, request: PlacementRequest) -> bool:
            return (
                (not pairs.is_pure or pairs.may_prefill(view, request))
                and self._has_room(view, request)
                and pairs.has_time(view, patience * request.num_hit_tokens(view.name))
            )

        def may_decode(view: WorkerView, request: PlacementRequest) -> bool:
            return pairs.may_decode(view, request) and can_hold(view, request)

        found_prefills = self._candidates(prefills, may_prefill, request, "", drawn)
        if not found_prefills:
            return None
        fits = may_decode if pairs.displaced else can_hold
        found_decodes = self._candidates(decodes, fits, request, "", drawn)
        found = pairs.choose(request, found_decodes, found_prefills, preferred)
        if not found:
            return None
        best = found[0]
        route, prefill = (Route.SAME_WORKER, None) if best.prefill == best.decode else (Route.HAND_OFF, best.prefill)
        return Choice(best.decode, prefill, route, best.ttft_s, pairs=found if self._config.explain else ())

    def choose_prefill(self, request: PlacementRequest, prefills: Pool, near: tuple[str, ...]) -> str | None:
        """A prefill worker for a request whose blocks are reserved already on a decode worker with the label `near`;
        None if none that the request does not exclude can start it now."""
        found = [
            view
            for view in self._candidates(prefills, self._has_room, request, "")
            if view.name not in request.excluded
        ]
        chosen, _ = self._pick("prefill", found, self._context(request, prefills, "", near))
        return chosen.name if chosen is not None else None

    def _collocated(self, request: PlacementRequest, decodes: Pool, last: str) -> Choice | None:
        found = self._candidates(
            decodes,
            lambda view, request: can_hold(view, request, computes=True) and self._has_room(view, request),
            request,
            last,
        )
        decode, ranked = self._pick("collocated", found, self._context(request, decodes, last))
        if decode is None:
            return None
        return Choice(decode.name, None, Route.COLLOCATED, self.predictor.here_s(decode, request), ranked)

    def _two_pools(
        self, request: PlacementRequest, decodes: Pool, prefills: Pool, last_prefill: str, last_decode: str
    ) -> Choice | None:
        found = self._candidates(decodes, can_hold, request, last_decode)
        reachable = [view for view in found if request.is_reachable(view.name, prefills)] if request.cut else found
        if found and not reachable:
            if request.never_here:
                return None
            here = self._collocated(request, decodes, last_decode)
            return replace(here, route=Route.NO_PREFILL) if here is not None else None
        decode, ranked_decodes = self._pick("decode", reachable, self._context(request, decodes, last_decode))
        if decode is None:
            return None
        cut = request.cut.get(decode.name, frozenset())
        may_compute = can_hold(decode, request, computes=True)
        if not may_compute:
            cut |= {decode.name}
        found = self._candidates(
            prefills,
            (lambda view, request: view.name not in cut and self._has_room(view, request)) if cut else self._has_room,
            request,
            last_prefill,
        )
        found = self._in_time(found, prefills, request)
        context = self._context(request, prefills, last_prefill, decode.label)
        prefill, ranked_prefills = self._pick("prefill", found, context)
        if prefill is not None and prefill.name == decode.name:  # it has both roles: nothing has to be handed over
            route, predicted_s = Route.COLLOCATED, self.predictor.here_s(decode, request)
        else:
            route, predicted_s = self._route(request, decode, prefill, may_compute=may_compute and len(prefills) > 0)
        if route is Route.HAND_OFF and prefill is None:
            return None
        name = prefill.name if prefill is not None and route is Route.HAND_OFF else None
        return Choice(decode.name, name, route, predicted_s, ranked_decodes, ranked_prefills)

    def _drawn(self, decodes: Pool, prefills: Pool) -> list[WorkerView] | None:
        """The sample for both parts of a request, where the workers of both pools are the same: of two samples of a
        large fleet hardly any worker would be in both, and each request be handed over. None: there is none. `prefills`
        is what the pairs looked at last."""
        limit = self._config.max_candidates
        if len(decodes) <= limit or len(decodes) != len(prefills):
            return None
        drawn = self.pairs.parts.draw(self._random, limit)
        return drawn if all(view.name in decodes for view in drawn) else None

    def _candidates(
        self,
        pool: Pool,
        fits: Filter,
        request: PlacementRequest,
        last: str,
        drawn: Sequence[WorkerView] | None = None,
    ) -> list[WorkerView]:
        favourites = (last, *self._homes(request, pool))
        return candidates(pool, fits, request, favourites, self._config.max_candidates, self._random, drawn)

    def _homes(self, request: PlacementRequest, pool: Pool) -> tuple[str, ...]:
        return self._adapters.homes(request.adapter, pool, request.now_s) if request.adapter else ()

    def _context(self, request: PlacementRequest, pool: Pool, last: str, near: tuple[str, ...] = ()) -> ScoringContext:
        return ScoringContext(
            request,
            least_hit=self._config.min_hit_share * request.num_tokens,
            scale_tokens=max(request.num_tokens, self._config.max_queued_tokens),
            tiers=self._config.tiers,
            last="" if last in request.excluded else last,
            near=near,
            homes=self._homes(request, pool),
        )

    def _in_time(self, views: list[WorkerView], pool: Pool, request: PlacementRequest) -> list[WorkerView]:
        """The workers with room that are predicted to meet the deadline. If none does: none of them while another one
        of the pool would, whose queue has no room yet, so that the request waits for it; else all of them."""
        if math.isinf(request.slack_s):
            return views

        def is_in_time(view: WorkerView) -> bool:
            return (self.predictor.pool_s(view, request) or 0.0) <= request.slack_s

        found = [view for view in views if is_in_time(view)]
        if found or not views:
            return found
        others = (view for view in pool if view.accepting and view.name not in request.excluded)
        if request.adapter:
            others = (view for view in others if request.adapter in view.adapters)
        return [] if any(map(is_in_time, others)) else views

    def _route(
        self, request: PlacementRequest, decode: WorkerView, prefill: WorkerView | None, *, may_compute: bool
    ) -> tuple[Route, float | None]:
        """Where the prompt is computed, and the predicted seconds to its first token. `may_compute`: the decode worker
        may do it."""
        thresholds = self._config.thresholds
        pool_s = self.predictor.pool_s(prefill, request) if prefill is not None else math.inf
        # Several routers may use a decode worker of another's shard at the same moment: only short prompts go there.
        most = max(thresholds.short_suffix_tokens, thresholds.max_here_tokens if decode.in_shard else 0)
        num_uncached = request.num_uncached_tokens(decode.name)
        if request.never_here or not may_compute or decode.num_queued_tokens + num_uncached > most:
            return Route.HAND_OFF, pool_s  # it already has enough to prefill
        here_s = self.predictor.here_s(decode, request)
        route = thresholds.route(num_uncached, here_s, pool_s)
        return route, pool_s if route is Route.HAND_OFF else here_s

    def _pick(
        self, stage: Stage, views: Sequence[WorkerView], context: ScoringContext
    ) -> tuple[WorkerView | None, Iterable[Candidate]]:
        """The best by weighted mean; ties go to this router's shard first, then at random."""
        if not views:
            return None, ()
        context.least_queued = min([view.num_queued_tokens for view in views])
        names, weights, columns = [], [], []
        for scorer, weight in self._scorers[stage]:
            if scorer.applies(context):
                names.append(scorer.name)
                weights.append(weight)
                columns.append(map(scorer.score, views, repeat(context)))
        total = sum(weights) or 1.0
        parts = list(zip(*columns, strict=True)) if columns else [()] * len(views)
        scores = [sum(map(mul, weights, part)) / total for part in parts]
        alone = False not in [view.in_shard for view in views]
        enough = max(scores) - (0.0 if alone else self._config.tie_margin)
        equals = [view for view, value in zip(views, scores, strict=True) if value >= enough]
        chosen = self._random.choice(equals if alone else [view for view in equals if view.in_shard] or equals)
        if not self._config.explain:
            return chosen, ()
        seen = [(view.name, view.num_queued_tokens, view.num_free_blocks, view.num_requests) for view in views]
        return chosen, Ranking(names, scores, parts, seen, context.request.hits.local)
