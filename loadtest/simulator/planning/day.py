"""A day of requests in the shape of a chat service's: few at night, most in the evening, noise on top."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadtest.workloads.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Day:
    """The day may be compressed: `length_s` is how long it lasts here."""

    length_s: float = 3 * 3600.0
    mean_rate: float = 2.0
    """Requests/s."""
    swing: float = 0.7
    """The peak's rate is (1 + swing) times the mean, the night's (1 − swing) times."""
    prompt_len: float = 10_000.0
    """Mean tokens; log-normal."""
    output_len: float = 1500.0
    prompt_sigma: float = 0.6
    output_sigma: float = 0.6
    max_prompt_len: int = 32_000

    def rate(self, time_s: float) -> float:
        """Requests/s at that time: two harmonics, so that the evening's peak is steeper than the morning."""
        turn = 2 * math.pi * time_s / self.length_s
        wave = 0.85 * math.sin(turn - math.pi / 2) - 0.25 * math.sin(2 * turn)
        return max(0.02 * self.mean_rate, self.mean_rate * (1 + self.swing * wave))


def day_trace(day: Day, seed: int) -> list[TraceRequest]:
    """Poisson arrivals at the day's rate; prompts share nothing."""
    rng = np.random.default_rng(seed)
    peak = day.mean_rate * (1 + day.swing) * 1.2
    requests: list[TraceRequest] = []
    now_s = 0.0
    while (now_s := now_s + float(rng.exponential(1 / peak))) < day.length_s:
        if rng.random() < day.rate(now_s) / peak:
            prompt = _length(rng, day.prompt_len, day.prompt_sigma, day.max_prompt_len)
            output = _length(rng, day.output_len, day.output_sigma, 8192)
            requests.append(TraceRequest(now_s, prompt, output))
    return requests


def _length(rng: np.random.Generator, mean: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(float(rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma)))))
