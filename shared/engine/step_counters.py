"""Counters of an engine's steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.telemetry.buckets import BucketCounts

GROWTH = 4.0
"""A step counts for at most this many times the longest step before it, or for SHORT_S where that is more."""
SHORT_S = 1.0
"""Seconds up to which every step counts in full: in the beginning this is more than GROWTH allows."""


STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
"""Seconds."""
STEP_KINDS = ("copy", "decode", "prefill", "mixed")
"""Only blocks to or from host memory; a token for each running answer; chunks of prompts, or of what is computed again;
both."""


def _by_kind() -> Mapping[str, BucketCounts]:
    return {kind: BucketCounts(STEP_BUCKETS_S) for kind in STEP_KINDS}


@dataclass(slots=True)
class StepCounters:
    """Sums since start. The engine thread adds; any thread may read."""

    num_steps: int = 0
    busy_s: float = 0.0  # seconds, from result to result while steps follow each other
    num_computed_tokens: int = 0  # token positions that went through the model
    num_output_tokens: int = 0  # sampled and kept
    num_prefill_tokens: int = 0  # of the computed ones, those of prompts and what is computed again
    durations_s: Mapping[str, BucketCounts] = field(default_factory=_by_kind)  # of steps, by kind
    gaps_s: BucketCounts = field(default_factory=lambda: BucketCounts(STEP_BUCKETS_S))
    """Time between tokens: a step's, once for each answer that continues in it. Tokens of one answer share the step's
    time."""
    num_turns: int = 0  # of the engine's loop: it came back for commands
    waiting: bool = False  # it waits for a command, and has nothing to compute
    longest_s: float = 0.0
    """Longest of the recent steps, by which an engine is judged to hang: each later step lets it decay by 1 %. One step
    raises it by GROWTH at most: else a process that once stood still for 20 s could hang for long without being
    noticed."""
    expected_s: float = 0.0
    """What each of the steps under way may take, seconds: as long as a recent one, or longer where it has a larger
    chunk of a prompt."""
    _most_tokens: float = 1.0  # of recent steps, which decays as `longest_s`
    _before_s: float = 0.0

    def begins(self, num_tokens: int = 0, predicted_s: float = 0.0) -> None:
        """A step is launched, behind one other at most. `num_tokens`: all of its tokens, where a chunk is among them;
        `predicted_s`: its time then, 0 where nothing is known of such steps."""
        likely_s = max(self.longest_s, predicted_s or self.longest_s * num_tokens / self._most_tokens)
        self.expected_s, self._before_s = max(likely_s, self._before_s), likely_s

    def add(
        self,
        num_computed_tokens: int,
        num_output_tokens: int,
        duration_s: float,
        num_prefill_tokens: int = 0,
        num_guesses: int = 0,
        bursts: Iterable[int] = (),
    ) -> None:
        """Counts one step. `num_guesses` of the computed tokens were guessed; `bursts`: for each answer that got
        more than one token, how many."""
        num_decoding = num_computed_tokens - num_prefill_tokens - num_guesses
        self.num_prefill_tokens += num_prefill_tokens
        num_bursts = 0
        for count in bursts:
            self.gaps_s.add(duration_s / count, count)
            num_bursts += 1
        self.gaps_s.add(duration_s, num_decoding - num_bursts)
        self.durations_s[STEP_KINDS[2 * bool(num_prefill_tokens) + bool(num_decoding)]].add(duration_s)
        self.num_steps += 1
        self.busy_s += duration_s
        self.longest_s = max(min(duration_s, max(SHORT_S, GROWTH * self.longest_s)), 0.99 * self.longest_s)
        self._most_tokens = max(num_computed_tokens, 0.99 * self._most_tokens)
        self.num_computed_tokens += num_computed_tokens
        self.num_output_tokens += num_output_tokens
