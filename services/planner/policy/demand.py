"""The load as a forecast: request rate with its trend, and the work that one request brings to each pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.planner.policy.config import PlannerConfig
from services.planner.policy.observation import Observation

_SIGNIFICANT = 2.0
"""Standard deviations by which the rate must have moved before a trend is believed."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the pools will be asked for, `start_s` from now."""

    rate: float
    """Requests/s."""
    rate_now: float
    """Requests/s as they come now, without a forecast."""
    rate_noise: float
    """Standard deviation of `rate_now` at constant load, requests/s."""
    prefill_load: float
    """Prefill workers kept busy."""
    prefill_s: float
    """Seconds of a prefill worker for one request, on average."""
    sequences: float
    """Sequences on decode workers, if they stay as long as those of the last minutes."""
    tpot_s: float
    """Mean TPOT of those; 0: none has ended."""
    workers_by_kv: float
    """Decode workers whose blocks hold them."""


class DemandModel:
    """Learns from observations. Brown's double smoothing of the rate; ratios of decaying sums for the rest."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._fast: float | None = None  # the rate, smoothed once: requests/s
        self._slow = 0.0  # and twice
        self._age_s = 0.0
        self._work_s = 0.0
        self._answered = 0.0
        self._arrived = 0.0
        self._sequence_s = 0.0
        self._kv_worker_s = 0.0
        self._tpot_s = self._finished = 0.0
        self._last_s: float | None = None

    def observe(self, seen: Observation) -> Demand | None:
        """The forecast with this observation; None until two of them have given a rate."""
        last_s, self._last_s = self._last_s, seen.now_s
        if last_s is None or seen.num_arrived is None or seen.now_s <= last_s:
            return None
        span_s = seen.now_s - last_s
        self._age_s += span_s
        self._observe_rate(seen.num_arrived / span_s, span_s)
        self._observe_work(seen, span_s)
        return self._forecast(seen.queue_len)

    def _observe_rate(self, rate: float, span_s: float) -> None:
        if self._fast is None:
            self._fast = self._slow = rate
            return
        # While little has been seen, plain means: the first seconds would weigh too much otherwise.
        weight = max(1 - math.exp(-span_s / self._config.smoothing_s), span_s / self._age_s)
        self._fast += weight * (rate - self._fast)
        self._slow += weight * (self._fast - self._slow)

    def _observe_work(self, seen: Observation, span_s: float) -> None:
        keep = math.exp(-span_s / self._config.work_smoothing_s)
        self._work_s = keep * self._work_s + seen.prefill_busy_s
        self._answered = keep * self._answered + seen.num_answered
        # By arrival, not as they are: with fewer workers sequences stay longer, and a batch that grows by itself would
        # be taken for load. A request's stay is learnt slowly, the rate fast.
        self._arrived = keep * self._arrived + (seen.num_arrived or 0)
        self._sequence_s = keep * self._sequence_s + seen.num_sequences * span_s
        self._kv_worker_s = keep * self._kv_worker_s + seen.decode_kv_share * max(1, seen.decode.num_ready) * span_s
        self._tpot_s = keep * self._tpot_s + seen.tpot_sum_s
        self._finished = keep * self._finished + seen.num_finished

    def _forecast(self, queue_len: int) -> Demand:
        assert self._fast is not None
        config, fast, slow = self._config, self._fast, self._slow
        moved = fast - slow
        # A Poisson process smoothed over τ has the variance rate / 2τ; arrivals in conversations vary more.
        span_s = min(2 * config.smoothing_s, self._age_s)
        noise = math.sqrt(max(slow, 1e-9) * (1 + config.variation) / span_s)
        rate = slow
        if abs(moved) > _SIGNIFICANT * noise:
            rate = max(0.0, fast + moved * (1 + config.start_s / config.smoothing_s))
        prefill_s = self._work_s / self._answered if self._answered > 0 else 0.0
        return Demand(
            rate=rate,
            rate_now=fast,
            rate_noise=noise,
            prefill_load=rate * prefill_s + queue_len * prefill_s / config.recover_s,
            prefill_s=prefill_s,
            sequences=rate * self._sequence_s / max(1.0, self._arrived),
            tpot_s=self._tpot_s / self._finished if self._finished > 0 else 0.0,
            workers_by_kv=rate * self._kv_worker_s / max(1.0, self._arrived),
        )
