"""How long the next step may take beside running answers. Pure policy, part of the scheduler.

An answer is due a token in a share of `tpot_target_s` from its first one on. Steps that are quicker put it ahead of
that: it has slack, which a later step may spend for a larger chunk of a prompt. It may also owe some, in steps to come:
a part of what its tokens that are expected still will earn if steps stay as they have been. A step spends a part of
the least of both sums, so that several in a row can, and takes no longer than the greatest gap between two tokens of an
answer. An answer that would miss its target even without prompts beside it bounds steps by that gap alone.

The share is `AIM` at first. It rises up to `MOST_AIM` while hardly any answer misses the target, less far where answers
are so short that what a client measures may differ by more than that leaves; and it falls while more than `LATE_SHARE`
of the answers miss it, on a machine whose steps are too uneven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shared.engine.plan import PlannedSequence, decode_work
from shared.engine.scheduler.block_admission import OutputLengths
from shared.engine.scheduler.sequence_table import SequenceTable
from shared.engine.sequence import EngineSequence, Goal
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepTimes, StepWork

AIM = 0.95
"""Share of the target that is aimed at until answers have shown that more is met: steps are predicted with errors."""
MOST_AIM = 0.99
"""The largest: an answer kept at the target itself would miss it as often as not."""
CLIENT_S = 0.005
"""What an answer may take longer at the client than here, from its first token to its last. Seconds: above AIM that is
left to the answers that are shorter than most."""
LEAST_AIM = 0.5
"""The least: chunks that became ever smaller would make prompts late in place of answers."""
LATE_SHARE = 0.1
"""Share of the answers that may miss the target before less than AIM is aimed at."""
RARELY_LATE = 0.01
"""The same above AIM: what more is aimed at there is worth a few hundredths of the prompts."""
AIM_STEP = 0.03
"""What is aimed at less after an answer that was late, in shares of the target."""
BORROWED = 0.8
"""What an answer may owe meanwhile, as a share of what its rest can earn. Without any each new answer stops the
chunks."""
MEAN_STEPS = 64
"""Steps over which the mean is taken by which answers earn."""
LENGTH_QUANTILE = 0.25
"""Quantile of the longer answers at which a running answer is expected to end: it is late if it ends sooner."""
FIRST_LENGTH = 24
"""Expected tokens of an answer, before enough answers have ended."""
SPENT_SHARE = 0.5
"""Share of the least slack that one step may spend."""
LEAST_SHARE = 0.5
"""Share of the target that a step may take beside answers that are late: quicker steps let them catch up, and chunks
that became ever smaller would not."""
GAP_TARGETS = 3.0
"""The greatest gap where none is set, in targets, or in steps without chunks where these take longer."""
CLEARLY_SOONER = 1.05
"""Factor on the tokens of prompts in the same time from which on chunks wait for steps of guesses: less is within what
is known of steps."""
LEAST_CHUNK = 16
"""Tokens that one prompt of each step may compute whatever the answers bear: no prompt stands still."""


class Pacing:
    """Bounds the chunks beside running answers by the time of the step, as far as it can be predicted."""

    def __init__(self, tpot_target_s: float, greatest_gap_s: float = 0.0, fit: StepTimeFit | None = None) -> None:
        """Seconds between two tokens of an answer, in the mean and at most; 0: no target, and GAP_TARGETS of it. By
        `fit` steps are predicted; without one any chunk has room."""
        self._fit = fit or StepTimeFit()
        self._lengths = OutputLengths(LENGTH_QUANTILE, FIRST_LENGTH)
        self._mean_s = 0.0
        """Mean time of the newest steps with answers, chunks included."""
        self._newest = StepWork()
        """The newest step's answers."""
        self.set_target(tpot_target_s, greatest_gap_s)

    def set_target(self, tpot_target_s: float, greatest_gap_s: float = 0.0) -> None:
        """Other targets, from the next step on."""
        self.tpot_target_s = tpot_target_s
        self.aim = AIM
        self._is_gap_set = greatest_gap_s > 0
        self.greatest_gap_s = max(tpot_target_s, greatest_gap_s) if greatest_gap_s else GAP_TARGETS * tpot_target_s

    @property
    def _due_s(self) -> float:
        """Between two tokens."""
        return self.aim * self.tpot_target_s

    def measured(self, work: StepWork, step_s: float) -> None:
        """A step has run."""
        if work.num_sequences:
            self._newest = StepWork(work.num_sequences, work.num_context_tokens)
            self._mean_s += (step_s - self._mean_s) / MEAN_STEPS if self._mean_s else step_s

    def began(self, sequence: EngineSequence, now_s: float) -> None:
        """An answer has its first token here, or continues after it had lost its blocks: it is in time from now on."""
        sequence.paced_from_s = now_s
        sequence.num_unpaced_tokens = sequence.num_output_tokens

    def ended(self, sequence: EngineSequence, now_s: float) -> None:
        """Learns how long answers become, and whether too many are late that could have been in time."""
        if sequence.goal is not Goal.COMPLETION or not sequence.num_output_tokens:
            return
        self._lengths.observe(sequence.num_output_tokens)
        num_paced = sequence.num_output_tokens - sequence.num_unpaced_tokens
        if self.tpot_target_s == 0 or sequence.paced_from_s is None or num_paced < 1:
            return
        if self._fit.predicted_s(self._newest) > self.tpot_target_s:
            return  # no chunk made it late
        is_late = now_s - sequence.paced_from_s > num_paced * self.tpot_target_s
        most = 1 - CLIENT_S / (self.tpot_target_s * self._lengths.expected(0))
        share = LATE_SHARE if self.aim < AIM else RARELY_LATE
        aim = self.aim + AIM_STEP * (share - is_late)
        self.aim = max(LEAST_AIM, min(aim, max(AIM, min(most, MOST_AIM))))

    def least_slack_s(self, sequences: Sequence[EngineSequence], decoding: StepWork, now_s: float) -> float | None:
        """Least slack of all running answers, whose next step is `decoding`, with what each may owe; None without any,
        or without a target."""
        if self.tpot_target_s == 0:
            return None
        return self._least_s(sequences, now_s, self._fit.predicted_s(decoding))

    def room(self, planned: Mapping[str, PlannedSequence], sequences: SequenceTable, begin_s: float) -> StepRoom:
        """Room for chunks beside the planned answers, in a step that begins at `begin_s`."""
        if self.tpot_target_s == 0:
            return StepRoom(None, math.inf, StepWork())
        decoding = decode_work(planned.values())
        limit_s = self.step_limit_s(sequences.of(planned), begin_s, self._fit.predicted_s(decoding))
        return StepRoom(self._fit.times, limit_s, decoding)

    def step_limit_s(self, answers: Sequence[EngineSequence], begin_s: float, decode_s: float = 0.0) -> float:
        """The longest that a step which begins then may take beside these answers, a step of which takes `decode_s`
        without chunks; infinite without answers. There is a target."""
        least = self._least_s(answers, begin_s, decode_s, is_planned=True)
        if least is None:
            return math.inf
        bounded_by = self.greatest_gap_s if self._is_gap_set else max(self.greatest_gap_s, GAP_TARGETS * decode_s)
        spent = SPENT_SHARE * least if least > 0 else least
        return min(bounded_by, max(LEAST_SHARE * self.tpot_target_s, self._due_s + spent))

    def _least_s(
        self, sequences: Sequence[EngineSequence], at_s: float, decode_s: float, *, is_planned: bool = False
    ) -> float | None:
        """Least slack of the answers among these, with what each may owe: it is expected to earn that in steps as the
        newest ones were, or as `decode_s` before there were any. None without answers. `is_planned`: with the tokens in
        flight, and without answers that are behind by more than steps without chunks will earn; infinite where all
        are."""
        due_s, target_s, expected = self._due_s, self.tpot_target_s, self._lengths.expected
        earned_s, most_earned_s = max(0.0, due_s - (self._mean_s or decode_s)), max(0.0, target_s - decode_s)
        least, num_answers = math.inf, 0
        for sequence in reversed(sequences):  # the newest have got ahead least: most of the others are passed over
            if sequence.paced_from_s is None or sequence.ends_with_first_token:
                continue
            num_answers += 1
            num_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
            if is_planned:
                num_tokens += sequence.num_in_flight_samples
            num_paced = num_tokens - sequence.num_unpaced_tokens
            slack_s = sequence.paced_from_s + num_paced * due_s - at_s
            if slack_s >= least:
                continue  # what it may owe only adds to that
            most = sequence.max_tokens_total - sequence.num_prompt_tokens
            num_left = max(0, min(expected(num_tokens), most) - num_tokens - 1)
            behind_s = -slack_s - num_paced * (target_s - due_s)
            if is_planned and slack_s <= 0 and behind_s > (num_left + 1) * most_earned_s:
                continue
            least = min(least, slack_s + BORROWED * num_left * earned_s)
        return least if num_answers else None

    def come_sooner_apart(
        self, decoding: StepWork, num_before: int, most: int, tokens_each: float, took_s: float
    ) -> bool:
        """Whether more tokens of prompts are computed where steps of guesses, which take `took_s` and bring each answer
        `tokens_each`, come between steps with a larger chunk, than where each step has a chunk that fits the target
        beside `decoding`; either way as many as the answers bear. A chunk is of a prompt behind its first `num_before`
        tokens, and of at most `most`."""
        times, due_s = self._fit.times, self._due_s
        earned_s = tokens_each * due_s - took_s
        if times is None or earned_s <= 0:
            return False
        longest_s = min(self.greatest_gap_s, due_s + earned_s)
        num_chunks = earned_s / (longest_s - due_s)  # for each step of guesses
        apart = times.largest_chunk(decoding, num_before, longest_s, most) * num_chunks / (num_chunks + tokens_each)
        return apart > CLEARLY_SOONER * times.largest_chunk(decoding, num_before, due_s, most)


class StepRoom:
    """What is left of a step's time while its chunks are chosen, one prompt after the other."""

    def __init__(self, times: StepTimes | None, limit_s: float, work: StepWork) -> None:
        """`work` is what the step computes already; without `times` or a limit any chunk has room."""
        self._times = times if limit_s < math.inf else None
        self.limit_s = limit_s
        """The longest that the step may take."""
        self.work = work

    @property
    def is_full(self) -> bool:
        """Whether no further prompt has room for a token."""
        return self._times is not None and self.work.num_chunks > 0 and not self._within(0, 1)

    def most(self, num_before: int, count: int) -> int:
        """Number of a prompt's `count` tokens behind its first `num_before` that have room; at least LEAST_CHUNK for
        the step's first prompt."""
        if self._times is None:
            return count
        least = 0 if self.work.num_chunks else min(count, LEAST_CHUNK)
        return max(least, self._within(num_before, count))

    def take(self, num_before: int, count: int) -> None:
        """The step computes them."""
        self.work = self.work.with_chunk(count, num_before)

    def predicted_s(self) -> float:
        """Predicted time of the step as it is; 0 where nothing is known."""
        return self._times.step_s(self.work) if self._times is not None else 0.0

    def _within(self, num_before: int, count: int) -> int:
        assert self._times is not None
        return self._times.largest_chunk(self.work, num_before, self.limit_s, count)
