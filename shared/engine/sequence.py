"""A request's tokens and block table on one worker. Plain numbers: no tensors here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from shared.engine.finish_reason import FinishReason
from shared.engine.plan import SampledToken
from shared.engine.sampling_params import SamplingParams


class Goal(Enum):
    """The part of a sequence that a worker computes."""

    FIRST_TOKEN = auto()
    """Compute the prompt, sample one token, ship the blocks: a prefill worker's part."""
    COMPLETION = auto()
    """Produce tokens until a stop condition: a decode worker's part."""


class Status(Enum):
    """State of a sequence on its worker."""

    RECEIVING = auto()
    """Its blocks are reserved and filled by a prefill worker."""
    WAITING = auto()
    """Not computed yet, or preempted; holds no blocks of the pool."""
    RUNNING = auto()
    """Holds blocks; each step computes some of its tokens."""
    FINISHED = auto()
    """Left the worker; holds nothing."""


@dataclass(slots=True, eq=False)  # each is itself alone: to find one in a list compares no fields
class EngineSequence:
    """One request on one worker.

    0 <= num_cached_tokens <= num_computed_tokens <= num_tokens <= max_tokens_total holds at all times. The newest
    token of a running sequence is known before its KV is, so num_computed_tokens < num_tokens between steps.
    """

    sequence_id: str
    token_ids: list[int]  # the prompt, then what was produced
    num_prompt_tokens: int  # the client's prompt; what a retried request had produced before follows it
    sampling: SamplingParams
    hash_root: bytes
    goal: Goal
    max_tokens_total: int
    eos_token_ids: frozenset[int]
    ship_blocks: frozenset[int] = frozenset()  # block indexes that a decode worker waits for
    receiver: bytes = b""  # transfer address of that decode worker
    tenant: str = ""  # whose quota its blocks count against in the store
    priority: int = 0  # below 0 it gives way to those that have more
    retain_s: float = 0.0  # how long its blocks are retained after each use: see `BlockPool.release`
    session: str = ""  # that they are retained for, its tenant's; empty: none
    next_turn_s: float | None = None  # from its end until the session's next turn; None: not said
    search: str = ""  # id of the sequence whose beam search it belongs to, its own where that begins; empty: none
    adapter: int = 0  # slot of its adapter on this worker, from 1; 0 = none
    arrival: int = 0  # order of arrival on this worker, set by the scheduler
    arrived_s: float = 0.0  # when that was, by the scheduler's clock
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)  # those of KV groups take turns; NO_BLOCK where none is held
    num_holes: int = 0  # places of `block_ids` without a block
    guess_states: list[int] = field(default_factory=list)  # as `PlannedSequence` has them, of the step in flight
    seen_from: list[int] = field(default_factory=list)  # by KV group: blocks before this one were given back
    block_table: tuple[int, ...] = ()  # `block_ids` as plans have them, made anew where those grew
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, as far as hashed
    num_cached_tokens: int = 0  # prefix found in the pool when it was first scheduled
    num_found_tokens: int = 0  # prefix that the pool had when it began to wait; 0 once it has started
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0  # computed by steps that were planned and not applied yet
    num_in_flight_samples: int = 0  # tokens that those steps will add
    host_slots: list[int] = field(default_factory=list)  # its blocks in host memory, while it waits preempted
    num_host_tokens: int = 0  # tokens whose KV they hold
    num_arrived_blocks: int = 0  # places of full blocks that were computed elsewhere and handed over, from the first on
    num_shipped_blocks: int = 0  # blocks below this index were handed to the shipper
    started: bool = False  # was scheduled at least once
    preempted_at: float = 0.0  # when it lost its blocks, by the scheduler's clock; 0 = it has some, or never had
    preempted_s: float = 0.0  # for how long it had none after it had started
    paced_from_s: float | None = None  # when its tokens began to be due, by the scheduler's clock; None: they are not
    num_unpaced_tokens: int = 0  # of its output, those it had then
    prompt_logprobs: dict[int, SampledToken] = field(default_factory=dict)  # by position, where they are asked for
    pooled: NDArray[np.float32] | None = None  # [hidden_size], sum of the hidden states that were asked for
    num_pooled_tokens: int = 0  # of which it is the sum
    sampled_in_plan: int = 0  # number of the last plan that samples for it; 0 = none
    newest_row: int = 0  # index of its first token among those that this plan samples
    has_penalties: bool = field(init=False)  # as its sampling settings say
    most_tokens: int = field(init=False)  # the answer ends with as many, the prompt's included
    ends: frozenset[int] = field(init=False)  # tokens that can end it
    # As `goal` says: Python 3.11 takes longer to look up a member of an Enum than to call a function.
    ends_with_first_token: bool = field(init=False)

    def __post_init__(self) -> None:
        max_tokens = self.sampling.max_tokens
        assert max_tokens is not None, "max_tokens is resolved"
        self.most_tokens = min(self.num_prompt_tokens + max_tokens, self.max_tokens_total)
        self.has_penalties = self.sampling.has_penalties
        self.ends = frozenset(self.sampling.stop_token_ids) | self.eos_token_ids
        self.ends_with_first_token = self.goal is Goal.FIRST_TOKEN
        assert 0 < self.num_prompt_tokens <= len(self.token_ids), "a sequence has a prompt"
        assert self.sampling.seed is not None, "seed is resolved"
        self.check()

    def check(self) -> None:
        """Asserts the order of the lengths."""
        num_tokens, num_computed = len(self.token_ids), self.num_computed_tokens
        assert 0 <= self.num_cached_tokens <= num_computed <= num_tokens <= self.max_tokens_total, (
            f"{self.sequence_id}: cached {self.num_cached_tokens}, computed {num_computed}, "
            f"tokens {num_tokens}, total {self.max_tokens_total}"
        )
        assert num_computed + self.num_in_flight_tokens <= num_tokens + self.num_in_flight_samples, (
            f"{self.sequence_id}: {self.num_planned_tokens} tokens planned of {self.num_tokens} and "
            f"{self.num_in_flight_samples} to come"
        )

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among those that run: by priority, then by arrival."""
        return -self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV this worker will hold for the sequence."""
        return self.num_tokens if self.ends_with_first_token else self.max_tokens_total

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far, on whichever worker."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that are to be computed here, as far as is known: less than are uncomputed where it waits, since what
        the pool or host memory has of it only needs to be taken."""
        return len(self.token_ids) - max(self.num_computed_tokens, self.num_found_tokens, self.num_host_tokens)

    @property
    def num_planned_tokens(self) -> int:
        """Tokens whose KV is computed when the steps in flight are done."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens that the next step can compute, the one that a step in flight will add included."""
        planned = self.num_computed_tokens + self.num_in_flight_tokens
        return len(self.token_ids) + self.num_in_flight_samples - planned

    @property
    def num_guessable_tokens(self) -> int:
        """Tokens beyond the next one that the answer may have: as many may be guessed."""
        return self.most_tokens - len(self.token_ids) - 1

    @property
    def num_plannable_tokens(self) -> int:
        """As `num_unplanned_tokens`, but 0 where the tokens that steps in flight will add are certainly its last here,
        or decide which beams continue."""
        num_samples = self.num_in_flight_samples
        num_tokens = len(self.token_ids) + num_samples
        if num_samples and (num_tokens >= self.most_tokens or self.search or self.ends_with_first_token):
            return 0
        return num_tokens - self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def num_held_blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.block_ids) - self.num_holes

    def table(self) -> tuple[int, ...]:
        """`block_ids` as a tuple, the same one until they grow or are given back. In a hole is the block that the
        group's next one is in: kernels may read there, and mask what they read."""
        if len(self.block_table) != len(self.block_ids):
            block_ids = self.block_ids
            if self.num_holes:
                block_ids, size = block_ids.copy(), len(self.seen_from)
                for group, first in enumerate(self.seen_from):
                    block_ids[group : first * size : size] = [block_ids[first * size + group]] * first
            self.block_table = tuple(block_ids)
        return self.block_table

    def targets(self, start: int, count: int) -> tuple[tuple[int, ...], int]:
        """The prompt tokens whose log-probabilities come of computing `count` tokens from `start` on, where they are
        asked for, and how many alternatives beside each."""
        num_alternatives = self.sampling.prompt_logprobs
        if num_alternatives is None or start + 1 >= self.num_prompt_tokens:
            return (), 0
        return tuple(self.token_ids[start + 1 : min(start + count + 1, self.num_prompt_tokens)]), num_alternatives

    def num_to_pool(self, start: int, count: int) -> int:
        """How many of the last of `count` tokens from `start` on have hidden states that are asked for."""
        pooling, end = self.sampling.pooling, start + count
        if not pooling or start >= self.num_prompt_tokens:
            return 0
        return count if pooling == "mean" else int(end == self.num_prompt_tokens)

    def add_pooled(self, count: int, hidden: NDArray[np.float32]) -> None:
        """Takes [hidden_size], the sum over `count` tokens."""
        self.pooled = hidden if self.pooled is None else self.pooled + hidden
        self.num_pooled_tokens += count

    @property
    def pooled_bytes(self) -> bytes | None:
        """What was asked for of the hidden states, as fp32; None where some were not computed, or twice, since the
        sequence was preempted meanwhile."""
        if not self.sampling.pooling:
            return b""
        wanted = self.num_prompt_tokens if self.sampling.pooling == "mean" else 1
        if self.pooled is None or self.num_pooled_tokens != wanted:
            return None
        return (self.pooled / np.float32(wanted)).astype("<f4").tobytes()

    def take_prompt_logprobs(self) -> tuple[SampledToken, ...]:
        """Log-probabilities of the prompt's tokens from the second one on; fewer where a prefix was not
        computed here."""
        if not self.prompt_logprobs:
            return ()
        found, self.prompt_logprobs = self.prompt_logprobs, {}
        return tuple(found[position] for position in sorted(found))

    def finish_reason(self) -> FinishReason | None:
        """Why the newest token ends the sequence, else None; the router looks for stop strings."""
        if self.search:
            return None  # that is for the search to say
        num_tokens = len(self.token_ids)
        if self.token_ids[-1] in self.ends and num_tokens > self.num_prompt_tokens and self._is_ended():
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.most_tokens else None

    def _is_ended(self) -> bool:
        """Whether the newest token, one of `ends`, ends the answer here."""
        sampling, newest = self.sampling, self.token_ids[-1]
        may_end = self.num_output_tokens >= sampling.min_tokens
        if may_end and newest in sampling.stop_token_ids:
            return True
        # A structure allows an end token only where the answer is complete, and nothing can follow it.
        is_structured = sampling.structured_output is not None
        return newest in self.eos_token_ids and (is_structured or (may_end and not sampling.ignore_eos))

    def banned_token_ids(self, num_guesses: int = 0) -> tuple[int, ...]:
        """Tokens that must not be sampled behind those known, in flight, and guessed: the ends, until min_tokens is
        reached. A structure that allows nothing else comes before them."""
        min_tokens = self.sampling.min_tokens
        if not min_tokens or self.num_output_tokens + self.num_in_flight_samples + num_guesses >= min_tokens:
            return ()
        ends = set(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos or self.sampling.structured_output is not None:
            ends |= self.eos_token_ids
        return tuple(sorted(ends))
