"""The coefficients of `StepTimes` from steps that were measured: all at once, or one after the other as they run.

The newest few steps of each kind are kept, a kind being the magnitudes of a step's numbers: hours of decode steps do
not push out what the last prompts showed. Of each kind the step of the median time counts, so a few slow ones, on a
machine that had other work, count for nothing. Then least squares of relative errors without negative coefficients,
once for each assumed balance: how many tokens' products take as long as reading the weights. The best one is kept,
and every other fit looks near it: a balance that is off by a third makes prompts seem a fifth quicker than they are.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.sizing.step_time import StepKinds, StepTimes, StepWork

BALANCES: Sequence[float] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of a step at which products may take as long as reading the weights: every other fit tries these."""
NEAR = (0.5, 0.71, 0.84, 1.0, 1.19, 1.41, 2.0)
"""Factors on the balance found last, which the fits between try."""
MAX_KINDS = 96
"""Most kinds of steps; the one that was seen longest ago makes room for a new one, except for KEPT_KINDS."""
KEPT_KINDS = 8
"""Newest kinds of chunks, and of batches, that are kept, with two sizes of batches: a worker that decodes for days
still knows what prompts take."""
STEPS_OF_A_KIND = 7
MIN_STEPS = 8
"""Fewest steps from which coefficients are fitted."""
FEWEST_BETWEEN_FITS = 6
MOST_BETWEEN_FITS = 256
"""Steps after which the coefficients are computed anew: at first, or after a step of a new kind, the fewest."""
BETWEEN_FITS_S = 0.2
"""Time of steps between two fits, once SETTLED_STEPS were seen: a fit takes a millisecond or two, as a tiny model's
step."""
SETTLED_STEPS = 500
HALF_LIFE = 2000
"""Steps in which a kind that is not seen any more loses half of its weight, down to LEAST_WEIGHT."""
LEAST_WEIGHT = 0.05
"""Least weight of a kind of steps: only it can tell of such steps."""
PACE_STEPS = 15
"""Newest steps, of whatever kind, whose median time over the fitted one scales all coefficients."""
PACE_INTERVAL = 8
"""Steps after which the pace is taken anew."""

_OUTLIER = 0.15
"""A relative error from which a kind counts less, as one whose machine was busy all the time."""
_AGAINST_FIXED = 1e-4
"""A fixed time that is all of each step counts as much as relative errors of the root of this. Steps with fewer tokens
than the balance all have the same time, fixed or of reading. Taken for fixed it would say that products, of which
reading hides some, take no time. Only for steps as they run: a series that was measured on purpose tells both apart."""
_PRIOR_WEIGHT = 1e-6
"""Weight of a prior's step beside a measured one's."""
_AS_GOOD = 1.02
"""Errors within this factor of the least are equal to it."""
_MOST_CHANGES = 20
_PRIOR = StepTimes(fixed_s=1e-3, read_s=4e-3, token_s=0.25e-3, sequence_s=0.0, kv_s=0.5e-6, attention_s=0.1e-6)
"""Shape of a small model on a processor; its scale is that of the steps measured."""
_PRIOR_STEPS = (
    StepWork(1, 256),
    StepWork(16, 4096),
    StepWork(16, 65536),
    StepWork(0, 0, 256, 32768, 1),
    StepWork(0, 0, 256, 524288, 1),
    StepWork(16, 4096, 256, 65536, 1),
)

Matrix = NDArray[np.float64]


class StepTimeFit:
    """Learns from every step as it ends: in a microsecond or two, and in a millisecond where the coefficients are
    computed anew, whatever was seen before."""

    def __init__(self, prior: StepTimes | None = None) -> None:
        """`prior` counts where nothing was measured; without one a shape is assumed, at the scale of what was."""
        self.num_steps = 0
        self.num_fitted = 0
        """Steps that were seen before the coefficients were computed last."""
        self.kinds = StepKinds()
        """Kinds of the steps that the coefficients rest on."""
        self._prior = prior
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._fitted = self._times = prior
        self._balance: float | None = None
        self._looks_near = False
        self._next_fit = MIN_STEPS
        self._unfitted_s = 0.0
        self._followed = 0
        self._newest: deque[tuple[StepWork, float]] = deque(maxlen=PACE_STEPS)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step that was measured; one without tokens, or without a time above 0, says nothing."""
        if work.num_tokens == 0 or not 0 < seconds < math.inf:
            return
        self.num_steps += 1
        self._unfitted_s += seconds
        key = _kind_of(work)
        kind = self._kinds.pop(key, None)
        if kind is None:
            kind = _Kind()
            if len(self._kinds) == MAX_KINDS:
                del self._kinds[_dispensable(self._kinds)]
            self._next_fit = min(self._next_fit, max(MIN_STEPS, self.num_steps + FEWEST_BETWEEN_FITS))
        kind.steps.append((work, seconds))
        kind.last = self.num_steps
        self._kinds[key] = kind
        self._newest.append((work, seconds))

    @property
    def times(self) -> StepTimes | None:
        """The coefficients by all that was seen; the prior, or None, before MIN_STEPS. Computed where they are asked
        for, if enough steps have come since."""
        is_due = self.num_steps >= self._next_fit and (
            self.num_steps < SETTLED_STEPS or self._unfitted_s >= BETWEEN_FITS_S
        )
        if is_due:
            self._fit()
        if is_due or self.num_steps >= self._followed + PACE_INTERVAL:
            self._follow()
        return self._times

    def predicted_s(self, work: StepWork) -> float:
        """Predicted time of such a step; 0 where nothing is known."""
        times = self.times
        return times.step_s(work) if times is not None else 0.0

    def _follow(self) -> None:
        """A machine that becomes slower does so for all kinds of steps: the newest ones tell of the others."""
        self._followed = self.num_steps
        if self._fitted is not None and len(self._newest) == PACE_STEPS:
            predicted = [(self._fitted.step_s(work), seconds) for work, seconds in self._newest]
            paces = [seconds / before for before, seconds in predicted if before > 0]
            self._times = self._fitted.scaled(statistics.median(paces or [1.0]))

    def _fit(self) -> None:
        self.num_fitted, self._unfitted_s = self.num_steps, 0.0
        self._next_fit = self.num_steps + min(MOST_BETWEEN_FITS, max(FEWEST_BETWEEN_FITS, self.num_steps // 2))
        self.kinds = _kinds_in(self._kinds)
        medians = [kind.median() for kind in self._kinds.values()]
        weights = [
            max(LEAST_WEIGHT, 0.5 ** ((self.num_steps - kind.last) / HALF_LIFE)) for kind in self._kinds.values()
        ]
        steps = [step for step, _ in medians]
        seconds = [taken for _, taken in medians]
        self._looks_near = self._balance is not None and not self._looks_near
        balances = _balances(self._balance, steps, near=self._looks_near)
        self._fitted, self._balance = _best(steps, seconds, weights, balances, self._prior, _AGAINST_FIXED)
        self._times = self._fitted


class _Kind:
    """The newest steps of one kind."""

    __slots__ = ("last", "steps")

    def __init__(self) -> None:
        self.steps: deque[tuple[StepWork, float]] = deque(maxlen=STEPS_OF_A_KIND)
        self.last = 0
        """Number of the newest one, over all kinds."""

    def median(self) -> tuple[StepWork, float]:
        """The step whose time is in the middle, or just below it."""
        ordered = sorted(self.steps, key=lambda step: step[1])
        return ordered[(len(ordered) - 1) // 2]


def fitted(steps: Sequence[StepWork], seconds: Sequence[float]) -> StepTimes:
    """The coefficients by these steps, each counting the same. Needs at least one, with a time above 0."""
    balances = [BALANCES[0] * 2 ** (i / 4) for i in range(4 * len(BALANCES) - 3)]
    return _best(steps, seconds, [1.0] * len(steps), balances, None)[0]


def _balances(last: float | None, steps: Sequence[StepWork], *, near: bool) -> list[float]:
    """Balances to try: near the last one or, as errors may be less at quite another one, everywhere, and the last one.
    Steps of fewer tokens tell nothing of a balance: without a bound it would double with each fit for as long as no
    step is seen that products bind, until prompts seem to take no time."""
    most = max(BALANCES[-1], *(step.num_tokens for step in steps))
    found = [share * last for share in NEAR] if near and last is not None else [*BALANCES, last or most, most]
    return sorted({min(most, balance) for balance in found})


def _kind_of(work: StepWork) -> tuple[int, ...]:
    """Powers of two of its numbers."""
    return (
        work.num_sequences.bit_length(),
        work.num_context_tokens.bit_length(),
        work.num_chunk_tokens.bit_length(),
        work.num_chunk_pairs.bit_length(),
    )


def _dispensable(kinds: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """Which of these makes room for a new one, of which the first was seen longest ago: see MAX_KINDS."""
    batches, chunks = Counter(key[:2] for key in kinds if key[0]), Counter(key[2:] for key in kinds if key[2])
    sizes = Counter(key[0] for key in kinds if key[0])  # two tell more than one: see `StepKinds`

    def is_needed(key: tuple[int, ...]) -> bool:
        return (
            (len(batches) <= KEPT_KINDS and batches[key[:2]] == 1)
            or (len(chunks) <= KEPT_KINDS and chunks[key[2:]] == 1)
            or (len(sizes) <= 2 and sizes[key[0]] == 1)
        )

    return next(key for key in kinds if not is_needed(key))


def _kinds_in(keys: Iterable[tuple[int, ...]]) -> StepKinds:
    """Numbers of kinds among steps of these `_kind_of`."""
    batches, chunks = {key[:2] for key in keys if key[0]}, {key[2:] for key in keys if key[2]}
    num_sizes = len({size for size, _ in batches})
    return StepKinds(len(batches) if num_sizes > 1 else num_sizes, len(chunks))


def _best(
    steps: Sequence[StepWork],
    seconds: Sequence[float],
    weights: Sequence[float],
    balances: Sequence[float],
    prior: StepTimes | None,
    against_fixed: float = 0.0,
) -> tuple[StepTimes, float]:
    """The fit of the balance whose errors are least, and that balance: of equals the nearest to the prior, or without
    one the largest. Where only small batches were seen nothing tells from which one on products bind.
    """
    taken, is_guess = np.array(seconds), prior is None
    if prior is None:
        ratios = [taken_s / _PRIOR.step_s(step) for step, taken_s in zip(steps, seconds, strict=True)]
        prior = _PRIOR.scaled(statistics.median(ratios))
    believed = np.array([prior.step_s(step) for step in _PRIOR_STEPS])
    rows = np.array([*steps, *_PRIOR_STEPS], dtype=np.float64)
    times = np.concatenate([taken, believed])
    given = np.concatenate([np.array(weights), np.full(len(_PRIOR_STEPS), _PRIOR_WEIGHT)])
    fits = [(*_fit_balance(rows, times, given, balance, against_fixed), balance) for balance in balances]
    enough = _AS_GOOD * min(loss for loss, *_ in fits) + 1e-9 * len(steps)
    equals = [(doubt, -at, solved) for loss, doubt, solved, at in fits if loss <= enough]
    _, at, solved = min(equals, key=lambda fit: fit[1] if is_guess else fit[0])
    balance = -at
    return _times_of(solved, balance), balance


def _fit_balance(
    rows: Matrix, seconds: Matrix, weights: Matrix, balance: float, against_fixed: float
) -> tuple[float, float, Matrix]:
    """(sum of bounded errors of measured steps, of the prior's, coefficients of the columns). `rows` are
    [num_steps, 5], a StepWork each, those of the prior last.

    With R the balance and N the tokens, fixed + hidden(R · token, N · token) is fixed + (1 - overlap) · token · (R + N)
    + overlap · token · max(R, N): linear in what is looked for, and each coefficient at least 0.
    """
    sequences, context, chunk, pairs = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
    tokens = sequences + chunk
    columns = [np.ones_like(tokens), balance + tokens, np.maximum(balance, tokens), sequences, context, pairs]
    relative = np.stack(columns, axis=1) / seconds[:, None]
    scale = relative.max(axis=0)
    relative /= scale
    solved = _not_negative(relative, weights, against_fixed)
    errors = np.abs(relative @ solved - 1)
    solved = _not_negative(relative, weights * np.minimum(1.0, _OUTLIER / np.maximum(errors, 1e-9)), against_fixed)
    errors = np.abs(relative @ solved - 1)
    bounded = np.where(errors < _OUTLIER, errors**2, _OUTLIER * (2 * errors - _OUTLIER))
    num_measured = len(seconds) - len(_PRIOR_STEPS)
    measured = float(weights[:num_measured] @ bounded[:num_measured])
    return measured, float(bounded[num_measured:].sum()), solved / scale


def _not_negative(relative: Matrix, weights: Matrix, against_fixed: float) -> Matrix:
    """Weighted least squares of relative @ x = 1 with x ≥ 0, by active sets (Lawson and Hanson, 1974, chapter 23): what
    is not 0 grows by one coefficient at a time, and shrinks where one would become negative. The first column is the
    fixed time: see _AGAINST_FIXED."""
    weighted = relative * weights[:, None]
    normal, right = weighted.T @ relative, weighted.sum(axis=0)
    normal += np.eye(len(right)) * (1e-12 * np.trace(normal))
    normal[0, 0] += against_fixed * weights.sum()
    solved, kept = np.zeros(len(right)), np.zeros(len(right), dtype=np.bool_)
    for _ in range(_MOST_CHANGES):
        slopes = right - normal @ solved
        slopes[kept] = 0.0
        steepest = int(slopes.argmax())
        if slopes[steepest] <= 1e-9 * right[steepest]:
            break
        kept[steepest] = True
        solved = _towards_best(normal, right, solved, kept)
    return solved


def _towards_best(normal: Matrix, right: Matrix, solved: Matrix, kept: NDArray[np.bool_]) -> Matrix:
    """The best of the kept coefficients; those that would be negative on the way there are not kept any more."""
    while True:
        (places,) = kept.nonzero()
        found = np.zeros(len(right))
        found[places] = best = np.linalg.solve(normal[places[:, None], places], right[places])
        negative = places[best <= 0].tolist()
        if not negative:
            return found
        share = min(solved[place] / (solved[place] - found[place] + 1e-300) for place in negative)
        solved = solved + share * (found - solved)
        for place in negative:
            if solved[place] <= 1e-12:
                solved[place], kept[place] = 0.0, False
        if all(kept[place] for place in negative):  # by rounding none reached 0: the lowest one does
            kept[min(negative, key=lambda place: solved[place])] = False


def _times_of(solved: Matrix, balance: float) -> StepTimes:
    fixed, added, hidden, sequence, kv, attention = (float(value) for value in solved)
    token = added + hidden
    overlap = hidden / token if token > 0 else 1.0
    return StepTimes(fixed, balance * token, token, sequence, kv, attention, overlap)
