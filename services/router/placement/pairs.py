"""The choice of a pair where workers have both roles: where a prompt is computed and where its answer runs, which may
be one worker.

For the best few of each, every pair has a predicted TTFT (`ttft_s` of the worker that prefills) and a predicted TPOT
(a step of the worker that decodes, with the answer in it), and from both the share of such requests that meet their
targets. Of the pairs with the most the one with the least score is taken:

    score = TTFT / its slack + TPOT / its target + HAND_OFF where a hand-off is needed
            + AGAINST for an answer on a worker that is not to decode, BESIDE for a prompt beside answers on one that is
            + COMPUTED · (share of the prompt that is not cached there + requests that lose their place by it)
            + GUEST for each worker of another router's shard

Both targets in one unit: a pair is as good as the shares of them that it leaves.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from services.router.placement.beside import DEFAULT_BUDGET, pace_of
from services.router.placement.decision import Pair, without_small_gains
from services.router.placement.demand import Demand
from services.router.placement.filters import can_hold
from services.router.placement.paces import (
    as_answers_end,
    busy_step_s,
    filled_s,
    joins_in_s,
    own_s,
    prompt_rate,
    steady_rate,
    tpot_s,
    ttft_s,
)
from services.router.placement.parts import Parts
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import PlacementRequest, Pool, Work, WorkerView
from shared.engine.scheduler.pacing import AIM
from shared.sizing.step_time import StepTimes

BEST = 4
"""Workers of each part whose pairs are compared."""
TPOT_SHARE = 0.95
"""Share of the target that a step may be predicted to take with a further answer in it: batches grow by their
context."""
ALIKE = 0.05
"""Shares of requests in time that differ by less are equal."""
HAND_OFF = 0.05
"""In score: a hand-off takes messages, and blocks on the network."""
HAND_OFF_GAIN = 0.2
"""In shares of requests in time: what a hand-off must give more than one worker for both parts, where every worker is
to do both. It takes processor time at three processes, and predictions of both are less exact than that."""
BESIDE = 0.1
"""In score: a prompt beside answers takes of what they have earned."""
AGAINST = 0.3
"""In score: the split of the fleet is meant for what follows, not for this request alone."""
COMPUTED = 0.5
"""In score: what is computed anew takes of all others, however much time this request has."""
MOST_DISPLACED = 1.0
"""Prompts that an answer may displace where its worker is not to decode, before the request waits for another one: it
would take more than it gives."""
FAR = 5.0
"""Times what the prompt takes on an idle worker: none with a longer TTFT is taken while a nearer may come in time."""
GUEST = 0.1
"""In score: several routers see the same idle worker at once, and all would use it."""
QUEUED_STEPS = 4
"""Longest queue of a worker that has room for a further prompt, in steps of the target's length: what waits at the
router can still go to the worker that is free first. See QUEUED_PROMPTS."""
QUEUED_PROMPTS = 1.25
"""Longest such queue in mean prompts, where that is longer than QUEUED_STEPS."""
SAMPLE = 64
"""Workers whose queues tell how long a request waits; of a larger pool half of each kind."""
MEAN_RATE = 0.02
"""By which the newest looks at workers change their mean rate: a wait is longer than the batch of this moment lasts."""
_Timed = Sequence[tuple[WorkerView, float]]
"""Workers, each with its seconds."""
NO_SLACK_S = 1.0
"""What a TTFT is compared with where the request has no deadline. Seconds."""


class PairPolicy:
    """Chooses a pair."""

    def __init__(self, tpot_target_s: float, predictor: TtftPredictor, demand: Demand) -> None:
        """`tpot_target_s`: of every answer, infinite: none. `predictor` knows how far predictions are off, and what a
        hand-off takes; it predicts until a worker has measured its steps. `demand` knows how long answers are: by their
        tokens a hand-off's gap is divided."""
        self._tpot_s = tpot_target_s
        self._predictor = predictor
        self._demand = demand
        self._random = random.Random(0)
        self._budget = DEFAULT_BUDGET
        self._mean_rate = 0.0
        """Tokens of prompts that a worker computes a second, in the mean."""
        self._preferred: Collection[str] = ()
        self.parts = Parts()
        """The workers by what they are to do, as of the newest look."""
        self._all_do_both = True
        self._seen: tuple[Collection[str], int] | None = None
        self._found: WorkerView | None = None
        self.displaced: Mapping[str, float] = {}
        self.delayed: Mapping[str, float] = {}
        self.is_pure = False
        """These three: see `SplitController`."""
        self.typical: StepTimes | None = None
        """What steps take where a worker has not measured any; None before one has."""
        self._life_s = math.inf  # mean time from an answer's first token to its last, as of the newest look

    def look(self, views: Iterable[WorkerView], preferred: Collection[str] = (), version: int | None = None) -> None:
        """Sorts the workers by what they are to do: those named by `preferred` decode, without any all do both. Takes
        the step times of some worker for typical: one that is not to decode, where there is one. The others have
        measured chunks beside answers, and say less of whole prompts. With the `version` of a pool and the `preferred`
        object of the last look nothing is sorted anew."""
        is_same = self._seen is not None and self._seen[0] is preferred and self._seen[1] == version
        if not is_same or self._found is None or self._found.times is None:
            self.parts, self._preferred = Parts(views, preferred), preferred
            self._all_do_both = not preferred or not self.parts.prefills
            everyone = chain(self.parts.prefills, self.parts.decodes)
            self._found = next((view for view in everyone if view.times is not None), None)
            self._seen = (preferred, version) if version is not None else None
        self._life_s = self._demand.num_gaps * self._tpot_s
        if self._found is not None:
            self.typical, self._budget = self._found.times, self._found.max_step_tokens or DEFAULT_BUDGET

    def may_decode(self, view: WorkerView, request: PlacementRequest) -> bool:
        """A request with a deadline waits for a worker that is to decode where another one would lose more by it than
        the request is worth."""
        return self.displaced.get(view.name, 0.0) <= MOST_DISPLACED or request.slack_s == math.inf

    def may_prefill(self, view: WorkerView, request: PlacementRequest) -> bool:
        """One with a deadline waits for a worker that is to prefill, where others compute hardly any prompts."""
        is_split = self.is_pure and request.slack_s < math.inf
        return not (is_split and view.num_decoding and view.name in self._preferred)

    # --- what admission asks, as of `TtftPredictor`

    def idle_s(self, own: Work, pool: Pool) -> float | None:
        """Seconds to the first token on the worker that computes it soonest, beside its answers, their queues aside."""
        if self.typical is None or not self._predictor.ttft.is_known:
            return self._predictor.idle_s(own, pool)
        self.look(pool, self._preferred, pool.version)  # workers may have come or gone since
        sample = [view for view in self.parts.draw(self._random, SAMPLE) if view.accepting]
        soonest_s = min((own_s(view, view.times or self.typical, own, self._tpot_s) for view in sample), default=0.0)
        alone_s = self._alone_s(own)
        soonest_s = as_answers_end(soonest_s, alone_s, self._life_s)  # while it computes, none begins there
        return self._begins_in_s + max(alone_s, soonest_s)

    def wait_s(self, ahead: Work, pool: Pool) -> float | None:
        """Seconds until some worker has computed its queue and its share of what is ahead."""
        if self.typical is None or not self._predictor.ttft.is_known:
            return self._predictor.wait_s(ahead, pool)
        self.look(pool, self._preferred, pool.version)
        drawn = [entry for entry in self.parts.draw_weighted(self._random, SAMPLE) if entry[0].accepting]
        if not drawn:
            return 0.0
        work = ahead if ahead.tokens else self._demand.prompt
        pairs = work.pairs / work.tokens
        rates = [prompt_rate(view, view.times or self.typical, self._tpot_s, pairs) for view, _ in drawn]
        computes = [self._all_do_both or view.name not in self._preferred for view, _ in drawn]
        if not any(computes):  # those that are to prefill take no more requests
            computes = [True] * len(drawn)
        steadily = [rate for rate, is_steady in zip(rates, computes, strict=True) if is_steady]
        now = sum(steadily) / len(steadily)
        self._mean_rate += MEAN_RATE * (now - self._mean_rate) if self._mean_rate else now
        # those that are to decode compute prompts beside their answers at the most, and others take these' place
        least = [self._mean_rate if is_steady else 0.0 for is_steady in computes]
        if self.is_pure:
            rates = [rate * is_steady for rate, is_steady in zip(rates, computes, strict=True)]
        rates = list(map(max, rates, least))
        now_s = filled_s(ahead.tokens, drawn, rates)
        if now_s <= self._life_s:
            return now_s
        steady = self._steady_rate(work)
        later = [max(rate, steady * is_steady) for rate, is_steady in zip(rates, computes, strict=True)]
        return as_answers_end(now_s, filled_s(ahead.tokens, drawn, later), self._life_s)

    def _steady_rate(self, work: Work) -> float:
        """Tokens of such prompts a second that continue at one worker while answers end and others begin: where all do
        both, beside those of its own prompts (0 where the target leaves no time for one), else on those that only
        prefill."""
        assert self.typical is not None, "see `look`"
        demand, pairs = self._demand, work.pairs / work.tokens
        if not self._all_do_both:
            return pace_of(self.typical, 0, 0, pairs, math.inf, self._budget).tokens_a_second
        return steady_rate(
            self.typical, pairs, self._tpot_s, self._budget,
            demand.prompt.tokens, demand.output_len, demand.context_len,
        )  # fmt: skip

    def has_time(self, view: WorkerView, num_hit_tokens: float) -> bool:
        """Whether the worker's queue is short enough for one more prompt, of which these tokens need no computing."""
        if not view.num_queued_tokens:
            return True
        num_tokens = view.num_queued_tokens - num_hit_tokens
        if num_tokens <= QUEUED_PROMPTS * self._demand.prompt.tokens:
            return True
        assert self.typical is not None, "see `look`"
        return num_tokens <= QUEUED_STEPS * self._tpot_s * prompt_rate(view, view.times or self.typical, self._tpot_s)

    def trusted_s(self, predicted_s: float | None) -> float | None:
        """See `WaitPredictor`: none before some were seen to hold, then with the wait for the step that runs."""
        if predicted_s is None or not self._predictor.ttft.is_known:
            return None
        return predicted_s + self._begins_in_s

    @property
    def _begins_in_s(self) -> float:
        """See `Reliability.begins_in_s`: a step is as long as the target for TPOT allows, without one as a full step of
        prompts takes."""
        full_s = self._alone_s(Work(self._budget)) if self.typical else 0.0
        return self._predictor.ttft.begins_in_s(self._tpot_s if self._tpot_s < math.inf else full_s)

    def choose(
        self,
        request: PlacementRequest,
        decodes: Sequence[WorkerView],
        prefills: Sequence[WorkerView],
        preferred: Collection[str],
    ) -> tuple[Pair, ...]:
        """The pairs of the best few candidates, the one to take first; empty where no worker is to start the request
        now. `decodes` can hold it and may decode it, `prefills` have room in their queues and may prefill it,
        `preferred` are to decode."""
        target_s, typical = self._tpot_s, self.typical
        assert typical is not None, "see `look`"
        waits = [(view, self._ttft_s(view, request)) for view in prefills]
        joins_s = min((wait_s for _, wait_s in waits), default=0.0)
        life_s = self._life_s
        steps = [
            (view, tpot_s(view, view.times or typical, 1, request.num_tokens, joins_s, life_s)) for view in decodes
        ]
        enough_s = TPOT_SHARE * target_s
        roomy = [
            (v, s)
            for v, s in steps
            if not v.num_decoding or s <= enough_s or s <= TPOT_SHARE * self._most_step_s(v, request)
        ]
        if not roomy:
            return ()
        found = self._alone(request, roomy, waits, preferred)
        if not found or not self._is_enough(found, prefills, preferred):
            found += self._apart(request, roomy, waits, preferred)
            if all(view.name in preferred for view in prefills):
                found = without_small_gains(found, HAND_OFF_GAIN)
        most = max((pair.in_time for pair in found), default=0.0)
        found.sort(key=lambda pair: (pair.in_time < most - ALIKE, pair.score))
        if found and (self._may_wait(found[0], request) or self._waits_apart(found[0], prefills, request)):
            return ()
        return tuple(found)

    def _alone(self, request: PlacementRequest, steps: _Timed, waits: _Timed, preferred: Collection[str]) -> list[Pair]:
        """The workers that are best for both parts together, and of the one that computes the prompt soonest, each
        as a pair."""
        waits_s = {view.name: wait_s for view, wait_s in waits}
        both = [(view, step_s) for view, step_s in steps if view.name in waits_s]

        def score(entry: tuple[WorkerView, float]) -> float:
            view, step_s = entry
            of_prompt = self._prefill_score(view, waits_s[view.name], request, preferred)
            return of_prompt + self._decode_score(view, step_s, preferred)

        def ordered(key: Callable[[tuple[WorkerView, float]], float]) -> Iterator[tuple[WorkerView, float]]:
            return (entry for entry in sorted(both, key=key) if can_hold(entry[0], request, computes=True))

        best = list(islice(ordered(score), BEST - 1))
        best += [one for one in islice(ordered(lambda one: waits_s[one[0].name]), 1) if one not in best]
        # each with its own answer among those beside which it computes the prompt
        return [
            self._pair(request, view, view, self._ttft_s(view, request, 1), step_s, preferred) for view, step_s in best
        ]

    def _is_enough(self, alone: Sequence[Pair], prefills: Sequence[WorkerView], preferred: Collection[str]) -> bool:
        """Whether no hand-off can give HAND_OFF_GAIN more, where every worker is to do both."""
        is_close = max(pair.in_time for pair in alone) + HAND_OFF_GAIN >= 1.0
        return is_close and all(view.name in preferred for view in prefills)

    def _apart(self, request: PlacementRequest, steps: _Timed, waits: _Timed, preferred: Collection[str]) -> list[Pair]:
        """Pairs of the best few of each part."""
        soonest_s = min((wait_s for _, wait_s in waits), default=0.0)
        typical, late = self.typical, (soonest_s, self._tpot_s, self._life_s)
        assert typical is not None, "see `look`"
        busy = [(view, busy_step_s(view, view.times or typical, step_s, *late)) for view, step_s in steps]
        decodes = heapq.nsmallest(BEST, busy, key=lambda entry: self._decode_score(entry[0], entry[1], preferred))
        prefills = heapq.nsmallest(
            BEST, waits, key=lambda entry: self._prefill_score(entry[0], entry[1], request, preferred)
        )
        return [
            self._pair(request, decode, prefill, wait_s, step_s, preferred)
            for decode, step_s in decodes
            for prefill, wait_s in prefills
            if prefill.name != decode.name and prefill.name not in request.cut.get(decode.name, ())
        ]

    def _ttft_s(self, view: WorkerView, request: PlacementRequest, num_new_answers: int = 0) -> float:
        """The load of the adapter, and then the prompt's computation."""
        return self._computed_s(view, request, num_new_answers) + self._predictor.load_s(view, request.adapter)

    def _computed_s(self, view: WorkerView, request: PlacementRequest, num_new_answers: int) -> float:
        """See `ttft_s`; where that is longer than the answers there last, the rest is computed without them."""
        times, own = view.times or self.typical, request.work(view.name)
        assert times is not None, "see `look`"
        context = request.num_tokens if num_new_answers else 0
        found_s = ttft_s(view, times, own, self._tpot_s, request.now_s, num_new_answers, context)
        if found_s <= self._life_s or (view.name in self._preferred and not self._all_do_both):
            return found_s  # on a worker that is to decode others take their place
        num_tokens, num_pairs = view.num_queued_tokens + own.tokens, view.num_queued_pairs + own.pairs
        budget = view.max_step_tokens or DEFAULT_BUDGET
        pace = pace_of(times, 0, 0, num_pairs / num_tokens, math.inf, budget, num_tokens)
        return as_answers_end(found_s, pace.seconds(num_tokens), self._life_s)

    def _most_step_s(self, view: WorkerView, request: PlacementRequest) -> float:
        """Longest step that the worker may take with such an answer besides."""
        times = view.times or self.typical
        assert times is not None, "see `look`"
        context = (view.num_context_tokens + request.num_tokens) / (view.num_decoding + 1)
        return times.most_step_s(self._tpot_s, context)

    def _may_wait(self, best: Pair, request: PlacementRequest) -> bool:
        """Whether the request is better off at the router than with the best pair that there is now: this one is far,
        and there is time to wait for another, or it is late anyway."""
        if math.isinf(request.slack_s) or self._alone_s(request.work(best.prefill)) > request.slack_s:
            return False
        whole = Work.of(request.num_tokens, 0)
        least_s = max(FAR * self._alone_s(whole), 2 * QUEUED_STEPS * self._tpot_s)
        if best.ttft_s > least_s and self._all_do_both:  # no worker is for long without answers, as in the overload
            rate = self._steady_rate(whole)
            least_s = max(least_s, FAR * whole.tokens / rate) if rate else math.inf
        return best.ttft_s > least_s and not (request.slack_s / 2 < best.ttft_s <= request.slack_s)

    def _waits_apart(self, best: Pair, prefills: Sequence[WorkerView], request: PlacementRequest) -> bool:
        """Whether a prompt that would take answers' place is better off at the router, until a worker that only
        prefills takes it: each of these has a queue, and one of them is in time in half of the slack."""
        if not self.delayed.get(best.prefill) or any(view.name not in self._preferred for view in prefills):
            return False
        apart = [view for view in self.parts.draw_prefills(self._random, SAMPLE) if view.accepting]
        soonest_s = min((self._ttft_s(view, request) for view in apart), default=math.inf)
        return soonest_s + self._predictor.hand_off_s <= request.slack_s / 2 < math.inf

    def _alone_s(self, own: Work) -> float:
        """To the first token on an idle worker."""
        assert self.typical is not None, "see `look`"
        pace = pace_of(self.typical, 0, 0, own.pairs / own.tokens, math.inf, self._budget, own.tokens)
        return pace.seconds(own.tokens)

    def _pair(
        self,
        request: PlacementRequest,
        decode: WorkerView,
        prefill: WorkerView,
        wait_s: float,
        step_s: float,
        preferred: Collection[str],
    ) -> Pair:
        is_one = prefill.name == decode.name
        least_s, gap_s = step_s, 0.0
        if not is_one:
            assert self.typical is not None, "see `look`"
            gap_s = self._predictor.gap_s + joins_in_s(decode, decode.times or self.typical, wait_s, self._tpot_s)
            wait_s += self._predictor.hand_off_s
            step_s += max(0.0, gap_s - step_s) / self._demand.num_gaps
        in_time = self._predictor.ttft.share_within(request.slack_s, wait_s)
        if not is_one:
            in_time *= self._share_with_gap(least_s, gap_s)
        if step_s > self._tpot_s:
            in_time = 0.0
        score = self._prefill_score(prefill, wait_s, request, preferred) + self._decode_score(decode, step_s, preferred)
        if not is_one:
            score += HAND_OFF
        return Pair(decode.name, prefill.name, wait_s, step_s, in_time, score)

    def _share_with_gap(self, step_s: float, gap_s: float) -> float:
        """The share of the answers with tokens enough to make up for a hand-off's gap by steps of that length, or by
        those that prompts beside answers make."""
        if self._all_do_both:
            step_s = max(step_s, AIM * self._tpot_s)
        if gap_s <= step_s or self._tpot_s == math.inf:
            return 1.0
        return self._demand.share_with_gaps((gap_s - step_s) / max(self._tpot_s - step_s, 1e-9))

    def _decode_score(self, view: WorkerView, step_s: float, preferred: Collection[str]) -> float:
        used = step_s / self._tpot_s if self._tpot_s < math.inf else view.num_requests / max(1, view.max_num_seqs)
        if view.name not in preferred:
            used += AGAINST + COMPUTED * self.displaced.get(view.name, 0.0)
        return min(used, 10.0) + GUEST * (not view.in_shard)

    def _prefill_score(
        self, view: WorkerView, wait_s: float, request: PlacementRequest, preferred: Collection[str]
    ) -> float:
        slack_s = request.slack_s if request.slack_s < math.inf else NO_SLACK_S
        used = min(10.0, wait_s / max(slack_s, 1e-3))
        num_tokens = request.work(view.name).tokens
        taken = num_tokens / request.num_tokens
        if is_beside := view.name in preferred and view.num_decoding > 0:
            taken += self.delayed.get(view.name, 0.0) * num_tokens / self._demand.prompt.tokens
        return used + BESIDE * is_beside + COMPUTED * taken + GUEST * (not view.in_shard)
