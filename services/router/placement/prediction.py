"""Predicted time to first token: the queue ahead of the prompt, the prompt itself, and the hand-off's messages.

The transfer of blocks to the decode worker is not included: the first token goes to the client without waiting for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from services.router.placement.views import NO_WORK, PlacementRequest, Pool, Tier, Work, WorkerView

FORGETTING = 0.99
"""The weight of an observation halves after about 70 newer ones."""
MIN_OBSERVATIONS = 8
"""With fewer observations nothing is predicted."""
MAX_NEWER = 7
"""A fit serves while at most this many observations are newer, and at most 1/16 of those in it: solving for each
prompt anew takes longer than choosing its workers."""
NEWEST = 31
"""Hand-offs whose median is taken: one behind a whole prompt, as the first ones may be, says little of the next."""
_SHORT_TOKENS = 256
_ATTENTION_UNIT = 1e-6  # scales the third feature to the others' magnitude


class CostModel:
    """Learns from (work ahead, own work, seconds); predicts None until it has seen enough.

    seconds = a + b · tokens + c · pairs: a fixed cost, and the work (`Work`) of the prompt and of everything queued
    before it. Wait and computation are learnt together because they overlap: one step computes the end of one prompt
    and the start of the next. Least squares with exponential forgetting; a term with a negative coefficient is dropped,
    so that a prediction grows with every argument.
    """

    def __init__(self) -> None:
        self.num_observations = 0
        self._sums = [0.0] * 9  # of the observations' `_terms`, weighted
        self._sum_tokens = 0.0
        self._sum_s = 0.0
        self._solution: list[float] | None = None
        self._num_fitted = 0  # observations in it

    def observe(self, ahead: Work, own: Work, seconds: float) -> None:
        """One prompt, from its arrival at the worker to its first token."""
        tokens, pairs = _features(ahead, own)
        # Relative errors: otherwise a few long prompts would determine the fit for short ones.
        weight = 1.0 / (tokens + _SHORT_TOKENS) ** 2
        terms = _terms(tokens, pairs, seconds)
        self._sums = [FORGETTING * sum_ + weight * term for sum_, term in zip(self._sums, terms, strict=True)]
        self._sum_tokens = FORGETTING * self._sum_tokens + tokens
        self._sum_s = FORGETTING * self._sum_s + seconds
        self.num_observations += 1

    @property
    def token_s(self) -> float | None:
        """Seconds a token, averaged over recent prompts: for a queue of which only the token count is known."""
        return self._sum_s / self._sum_tokens if self.num_observations >= MIN_OBSERVATIONS else None

    def predict_s(self, ahead: Work, own: Work) -> float | None:
        """Seconds to the first token, the work `ahead` included."""
        if self.num_observations < MIN_OBSERVATIONS:
            return None
        num_newer = self.num_observations - self._num_fitted
        if self._solution is None or num_newer > min(MAX_NEWER, self._num_fitted // 16):
            one, t, p, tt, tp, pp, *targets = self._sums
            self._solution = _nonnegative([[one, t, p], [t, tt, tp], [p, tp, pp]], targets)
            self._num_fitted = self.num_observations
        fixed_s, token_s, pair_s = self._solution
        tokens, pairs = _features(ahead, own)
        return fixed_s + token_s * tokens + pair_s * pairs


def _features(ahead: Work, own: Work) -> tuple[float, float]:
    return ahead.tokens + own.tokens, _ATTENTION_UNIT * (ahead.pairs + own.pairs)


def _terms(tokens: float, pairs: float, seconds: float) -> tuple[float, ...]:
    """Products of the features (1, tokens, pairs) with each other, and with the seconds."""
    return (
        1.0, tokens, pairs, tokens * tokens, tokens * pairs, pairs * pairs,
        seconds, tokens * seconds, pairs * seconds,
    )  # fmt: skip


def _nonnegative(products: list[list[float]], targets: list[float]) -> list[float]:
    """Least squares whose coefficients are all ≥ 0: drops the most negative one until none is negative."""
    kept = [0, 1, 2]
    while kept:
        solved = _solve([[products[i][j] for j in kept] for i in kept], [targets[i] for i in kept])
        if min(solved) >= 0:
            result = [0.0] * 3
            for i, value in zip(kept, solved, strict=True):
                result[i] = value
            return result
        kept.pop(solved.index(min(solved)))
    return [0.0] * 3


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a small symmetric system; a little ridge keeps a degenerate one solvable."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        rows[i][i] = rows[i][i] * (1 + 1e-9) + 1e-300
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i] if rows[i][i] > 1e-280 else 0.0
    return solution


_SMOOTHING = 0.05
_LEAST_SPREAD = 0.1
"""Least spread of the logarithm of observed over predicted: no prediction is nearer than this."""


class Reliability:
    """How far predictions are off: the logarithm of observed over predicted, its running mean and spread."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._square = 0.25**2
        self._num_seen = 0
        self._late: deque[float] = deque(maxlen=NEWEST)  # seconds by which the newest ones were exceeded
        self._late_s = 0.0  # their median, at least 0

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to refuse a request by such a prediction. A model that has seen small steps alone may
        be far off, and would never see others if it refused them."""
        return self._num_seen >= MIN_OBSERVATIONS

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """One prediction and what came of it."""
        if not (0 < predicted_s < math.inf and observed_s > 0):
            return
        self._num_seen += 1
        self._late.append(observed_s - predicted_s)
        self._late_s = max(0.0, median(self._late))
        off = max(-2.0, min(2.0, math.log(observed_s / predicted_s)))
        self._mean += _SMOOTHING * (off - self._mean)
        self._square += _SMOOTHING * ((off - self._mean) ** 2 - self._square)

    def begins_in_s(self, step_s: float) -> float:
        """Seconds that a prompt waits at its worker before its own first step, which predictions do not include: for
        the step that runs, and the one that is planned behind that. Learnt, as not all workers plan ahead: the median
        by which the newest predictions were exceeded, at most two steps of `step_s`."""
        return min(self._late_s, 2 * step_s)

    def share_within(self, limit_s: float, predicted_s: float) -> float:
        """The share of times predicted as this one that stay within the limit, in [0, 1]: a normal distribution of the
        logarithm."""
        if math.isinf(limit_s):
            return 1.0
        if limit_s <= 0 or math.isinf(predicted_s):
            return 0.0
        off = math.log(limit_s / max(predicted_s, 1e-9)) - self._mean
        spread = max(_LEAST_SPREAD, math.sqrt(self._square))
        return 0.5 * (1.0 + math.erf(off / (spread * math.sqrt(2.0))))


class TtftPredictor:
    """Learns what prefill costs in both pools. Predicts None until it has seen enough prompts."""

    def __init__(self) -> None:
        self.prefill = CostModel()
        self._here = CostModel()
        self.hand_off_s = 0.0
        """Time of reserve, submit and the first token's return: the median of the newest. Seconds."""
        self.gap_s = 0.0
        """From a first token that was computed elsewhere to the second one: the median of the newest. Seconds."""
        self.adapter_s = dict.fromkeys(Tier, 0.0)
        """For which a request waited whose adapter the worker had there: the median of the newest. Seconds."""
        self._adapters: dict[Tier, deque[float]] = {tier: deque(maxlen=NEWEST) for tier in Tier}
        self._hand_offs: deque[float] = deque(maxlen=NEWEST)
        self._gaps: deque[float] = deque(maxlen=NEWEST)
        self.ttft = Reliability()
        """How reliable what was predicted at the choice of workers is."""

    @property
    def here(self) -> CostModel:
        """Cost of prefill on a decode worker; until enough was observed, the cost on a prefill worker."""
        return self._here if self._here.token_s is not None else self.prefill

    def observe_prefill(self, ahead: Work, own: Work, seconds: float) -> None:
        """A prefill worker computed a prompt behind others, wait and computation in one."""
        self.prefill.observe(ahead, own, seconds)

    def observe_here(self, ahead: Work, own: Work, seconds: float) -> None:
        """A decode worker computed a prompt together with its batch."""
        self._here.observe(ahead, own, seconds)

    def observe_hand_off(self, seconds: float) -> None:
        """Time from the choice of workers to the first token, less queue and compute."""
        self._hand_offs.append(seconds)
        self.hand_off_s = median(self._hand_offs)

    def observe_gap(self, seconds: float) -> None:
        """An answer whose prompt another worker computed has its second token, so long after the first."""
        self._gaps.append(seconds)
        self.gap_s = median(self._gaps)

    def observe_adapter(self, seconds: float, tier: Tier) -> None:
        """A request waited so long for its adapter, which the worker had there when it was chosen."""
        if tier is not Tier.READY:
            self._adapters[tier].append(seconds)
            self.adapter_s[tier] = median(self._adapters[tier])

    def load_s(self, view: WorkerView, adapter: str) -> float:
        """Seconds until a request's adapter is ready on the worker; 0 for none, and where it is ready."""
        return self.adapter_s[view.adapters.get(adapter, Tier.FOLDER)] if adapter else 0.0

    def least_load_s(self, pool: Pool, adapter: str) -> float:
        """Seconds of load of the worker that has the adapter soonest."""
        return min((self.load_s(view, adapter) for view in pool if view.accepting), default=0.0) if adapter else 0.0

    def _behind_load_s(self, model: CostModel, view: WorkerView, request: PlacementRequest) -> float | None:
        """The queue passes while an adapter is loaded."""
        own_s = model.predict_s(view.queued, request.work(view.name))
        load_s = self.load_s(view, request.adapter)
        if own_s is None or not load_s:
            return own_s
        alone_s = model.predict_s(NO_WORK, request.work(view.name)) or 0.0
        return max(own_s, load_s + alone_s)

    def pool_s(self, view: WorkerView, request: PlacementRequest) -> float | None:
        """Seconds to the first token through this prefill worker."""
        own_s = self._behind_load_s(self.prefill, view, request)
        return None if own_s is None else own_s + self.hand_off_s

    def here_s(self, view: WorkerView, request: PlacementRequest) -> float | None:
        """Seconds to the first token if this decode worker computes the prompt itself."""
        return self._behind_load_s(self.here, view, request)

    def idle_s(self, own: Work, pool: Pool) -> float | None:  # noqa: ARG002 - see `WaitPredictor`
        """Seconds to the first token on an idle worker."""
        own_s = self._prompts.predict_s(NO_WORK, own)
        return None if own_s is None else own_s + self.hand_off_s

    def wait_s(self, ahead: Work, pool: Pool) -> float | None:
        """Seconds until some worker of `pool` has computed its queue and its share of what is `ahead`.

        Waiting tokens fill up the shortest queues first. 0 with an idle worker and nothing ahead.
        """
        token_s = self._prompts.token_s
        if token_s is None:
            return None
        queues = [(view.num_queued_tokens, 1.0) for view in pool if view.accepting]
        return filled_level(ahead.tokens, queues) * token_s if queues else 0.0

    def trusted_s(self, predicted_s: float | None) -> float | None:
        """See `WaitPredictor`: all of them, for nothing is predicted by too few prompts."""
        return predicted_s

    @property
    def _prompts(self) -> CostModel:
        """The model of the workers that compute most prompts; in collocated mode those are decode workers."""
        return self.prefill if self.prefill.num_observations else self._here


def filled_level(amount: float, queues: Sequence[tuple[float, float]]) -> float:
    """Height of the lowest of some queues, given as (height, width), after `amount` was added, always to the lowest."""
    if not amount:
        return min(height for height, _ in queues)
    below = queues
    while True:
        level = (amount + sum(height * width for height, width in below)) / sum(width for _, width in below)
        kept = [queue for queue in below if queue[0] <= level]
        if len(kept) == len(below):
            return level
        below = kept
