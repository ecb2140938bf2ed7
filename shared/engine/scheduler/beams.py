"""Beam search: several answers to one prompt followed at once, of which the likeliest continue. Pure policy.

A search begins as one sequence. Each open answer, a *beam*, is a sequence of its own while a token is computed for it.
Then it is parked: it leaves the table and keeps its blocks until the others of its search are there too. The likeliest
continuations of all are the next beams. The first one of a parent takes over its blocks. Each further one shares those
that are full and has the last one copied, where the pool has a block for it; else it waits as a preempted sequence
does, and finds the full blocks in the cache. Parked blocks are given back first where any sequence lacks blocks, so
that beams which wait for each other can always continue one by one.

What continues and what ends is chosen as `transformers` chooses it (`GenerationMixin._beam_search`), with exact sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shared.engine.finish_reason import FinishReason
from shared.engine.messages import BeamAnswer, NewToken
from shared.engine.plan import SampledToken
from shared.engine.sampling_params import MAX_LOGPROBS, BeamSearch
from shared.engine.scheduler.block_tables import BlockTables
from shared.engine.scheduler.host_swap import HostSwap
from shared.engine.scheduler.sequence_table import SequenceTable
from shared.engine.sequence import EngineSequence, Goal, Status
from shared.errors import InvalidRequest
from shared.kv.pool import BlockPool, OutOfBlocks


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam with one more token."""

    parent: int  # place among the beams
    token_id: int
    total: float  # sum of the answer's log-probabilities


class BeamChoice:
    """Which beams continue, and which answers are the best ended ones."""

    def __init__(self, search: BeamSearch, ends: frozenset[int], max_tokens: int) -> None:
        """An answer ends with a token of `ends`, or with `max_tokens` tokens."""
        self._search = search
        self._ends = ends
        self._max_tokens = max_tokens
        self._ended: list[BeamAnswer] = []  # the best first

    def advance(
        self, beams: Sequence[tuple[tuple[int, ...], float]], likeliest: Sequence[Sequence[tuple[int, float]]]
    ) -> list[Continuation]:
        """The next beams, the likeliest first; none where the search is over. `beams`: the tokens of each answer and
        the sum of their log-probabilities; `likeliest`: of each, (token id, log-probability) of what may come next."""
        width = self._search.width
        found = [
            Continuation(place, token_id, total + logprob)
            for place, ((_, total), top) in enumerate(zip(beams, likeliest, strict=True))
            for token_id, logprob in top
        ]
        found.sort(key=lambda item: -item.total)  # stable: of equal ones the better beam's, then the likelier token's
        num_tokens = len(beams[0][0]) + 1
        is_last = num_tokens >= self._max_tokens
        best = found[:width]  # an answer that ends counts where it is one of these
        self._end([item for item in best if is_last or item.token_id in self._ends], beams, num_tokens)
        if is_last:
            return []
        open_ones = [item for item in found if item.token_id not in self._ends][:width]
        return open_ones if open_ones and self._can_improve(open_ones[0].total, num_tokens) else []

    def _end(
        self, ending: Sequence[Continuation], beams: Sequence[tuple[tuple[int, ...], float]], num_tokens: int
    ) -> None:
        for item in ending:
            reason = FinishReason.STOP if item.token_id in self._ends else FinishReason.LENGTH
            score = item.total / float(num_tokens) ** self._search.length_penalty
            self._ended.append(BeamAnswer((*beams[item.parent][0], item.token_id), reason, score, item.total))
        self._ended.sort(key=lambda answer: -answer.score)
        del self._ended[self._search.width :]

    def _can_improve(self, best_open: float, num_tokens: int) -> bool:
        """Whether an open answer, of which the best has this sum, may yet be better than an ended one."""
        search = self._search
        if len(self._ended) < search.width:
            return True
        if search.early_stopping == "true":
            return False
        longest = search.early_stopping == "never" and search.length_penalty > 0
        length = float(self._max_tokens if longest else num_tokens)
        return bool(best_open / length**search.length_penalty > self._ended[-1].score)

    @property
    def answers(self) -> tuple[BeamAnswer, ...]:
        """The result, the best first."""
        return tuple(self._ended[: self._search.num_answers])


@dataclass(slots=True)
class _Beam:
    sequence: EngineSequence
    total: float = 0.0
    top: tuple[tuple[int, float], ...] | None = None  # what may come next; None: being computed
    is_parked: bool = False


@dataclass(slots=True)
class _Search:
    root: str  # the id of the sequence that it began as
    choice: BeamChoice
    beams: list[_Beam]
    num_forks: int = 0

    @property
    def is_complete(self) -> bool:
        return all(beam.top is not None for beam in self.beams)


class BeamSearches:
    """The searches of one scheduler; not thread-safe, like that."""

    def __init__(
        self,
        pool: BlockPool,
        sequences: SequenceTable,
        tables: BlockTables,
        swap: HostSwap,
        max_num_seqs: int,
        clock: Callable[[], float],
        *,
        is_plain: bool,
    ) -> None:
        """`is_plain`: all layers keep all tokens, so that a table of blocks can be shared up to its last one."""
        self._pool = pool
        self._sequences = sequences
        self._tables = tables
        self._swap = swap
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._is_plain = is_plain
        self._searches: dict[str, _Search] = {}

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._searches

    def begin(self, sequence: EngineSequence) -> None:
        """Called before a sequence joins the table; nothing happens to one without beams. Raises as `check_ends`."""
        self.check_ends(sequence)
        search = sequence.sampling.beams
        if search is None:
            return
        sequence.search = sequence.sequence_id
        if sequence.goal is Goal.FIRST_TOKEN:
            return  # the blocks are wanted elsewhere, and the token means nothing
        sampling = sequence.sampling
        ends = _ends(sequence)
        num_likeliest = search.width + len(ends)  # of which at least `width` do not end it
        most = sequence.most_tokens - sequence.num_prompt_tokens
        sequence.sampling = replace(sampling, beams=None, temperature=0.0, logprobs=num_likeliest)
        choice = BeamChoice(search, ends, most)
        self._searches[sequence.sequence_id] = _Search(sequence.sequence_id, choice, [_Beam(sequence)])

    def check_ends(self, sequence: EngineSequence) -> None:
        """Raises InvalidRequest where more likeliest tokens would be wanted than a step gives."""
        search = sequence.sampling.beams
        if search is not None and search.width + len(ends := _ends(sequence)) > MAX_LOGPROBS:
            limit = MAX_LOGPROBS - len(ends)
            raise InvalidRequest(
                f"best_of: at most {limit} beams are followed where {len(ends)} tokens end an answer",
                field="best_of",
                limit=limit,
            )

    def take(self, sequence: EngineSequence, token: SampledToken) -> tuple[list[NewToken], list[EngineSequence]]:
        """A token was chosen for a beam, whose sequence is running: it is parked. Returns the tokens for the search's
        reader, and the sequences that have ended, whose blocks the caller gives back."""
        search = self._searches[sequence.search]
        beam = next(beam for beam in search.beams if beam.sequence is sequence)
        beam.top = token.top
        beam.is_parked = True
        self._sequences.end(sequence)
        if not search.is_complete:
            return [], []
        return self._advance(search)

    def end(self, root: str) -> tuple[EngineSequence, ...]:
        """Forgets a search; returns its sequences, of which the parked ones have left the table."""
        sequences = tuple(beam.sequence for beam in self._searches.pop(root).beams)
        for sequence in sequences:
            self._swap.drop_clones(sequence.block_ids)
        return sequences

    def give_back(self) -> bool:
        """Gives back the blocks of parked beams, which are computed again from what is cached of them; False where none
        holds any."""
        for search in self._searches.values():
            for beam in search.beams:
                if beam.is_parked and beam.sequence.block_ids:
                    self._tables.free(beam.sequence, returns=True)
                    beam.sequence.num_computed_tokens = beam.sequence.num_cached_tokens = 0
                    return True
        return False

    def check(self) -> None:
        """Asserts that no search waits for nothing."""
        for search in self._searches.values():
            assert not search.is_complete, f"the beams of {search.root} are all parked"
            for beam in search.beams:
                known = self._sequences.get(beam.sequence.sequence_id)
                assert (known is beam.sequence) is not beam.is_parked, f"{beam.sequence.sequence_id} is lost"

    # --- inside

    def _advance(self, search: _Search) -> tuple[list[NewToken], list[EngineSequence]]:
        before = search.beams
        num_prompt = before[0].sequence.num_prompt_tokens
        answers = [(tuple(beam.sequence.token_ids[num_prompt:]), beam.total) for beam in before]
        going_on = search.choice.advance(answers, [beam.top or () for beam in before])
        if not going_on:
            del self._searches[search.root]
            found = search.choice.answers
            last = found[0]
            token = SampledToken(last.token_ids[-1])
            return [NewToken(search.root, token, last.finish_reason, beams=found)], [b.sequence for b in before]
        by_parent: dict[int, list[Continuation]] = {}
        for item in going_on:
            by_parent.setdefault(item.parent, []).append(item)
        made: dict[int, _Beam] = {}
        for parent, items in by_parent.items():
            sequence = before[parent].sequence
            sequence.token_ids.append(items[0].token_id)
            self._place(sequence, sequence)
            made[id(items[0])] = _Beam(sequence, items[0].total)
            for item in items[1:]:
                made[id(item)] = _Beam(self._fork(search, sequence, item.token_id), item.total)
        search.beams = [made[id(item)] for item in going_on]
        ended = [beam.sequence for place, beam in enumerate(before) if place not in by_parent]
        return [NewToken(search.root, SampledToken(going_on[0].token_id), None)], ended

    def _fork(self, search: _Search, parent: EngineSequence, token_id: int) -> EngineSequence:
        search.num_forks += 1
        fork = EngineSequence(
            sequence_id=f"{search.root}~{search.num_forks}",
            token_ids=[*parent.token_ids[:-1], token_id],
            num_prompt_tokens=parent.num_prompt_tokens,
            sampling=parent.sampling,
            hash_root=parent.hash_root,
            goal=parent.goal,
            max_tokens_total=parent.max_tokens_total,
            eos_token_ids=parent.eos_token_ids,
            tenant=parent.tenant,
            priority=parent.priority,
            retain_s=parent.retain_s,
            session=parent.session,
            next_turn_s=parent.next_turn_s,
            search=parent.search,
            adapter=parent.adapter,
            block_hashes=list(parent.block_hashes),
            num_arrived_blocks=parent.num_arrived_blocks,
            started=True,
        )
        self._share(parent, fork)
        self._place(fork, parent)
        return fork

    def _share(self, parent: EngineSequence, fork: EngineSequence) -> None:
        """Gives a fork the full blocks of its parent, which runs, and a copy of the last one, where that can be."""
        if not self._is_plain or parent.status is not Status.RUNNING or self._is_batch_full:
            return
        block_size, num_computed = self._pool.block_size, parent.num_computed_tokens
        full = parent.block_ids[: num_computed // block_size]
        own: list[int] = []
        if num_computed % block_size:
            try:
                own = self._pool.allocate(1)
            except OutOfBlocks:
                return
            self._swap.clone(parent.block_ids[len(full)], own[0])
        self._pool.acquire(full)
        fork.block_ids = full + own
        fork.num_computed_tokens = num_computed

    @property
    def _is_batch_full(self) -> bool:
        return self._sequences.num_running >= self._max_num_seqs

    def _place(self, sequence: EngineSequence, like: EngineSequence) -> None:
        """Into the table, at the rank of its kin: it runs where it has its blocks and the batch a place, else it
        waits."""
        arrival, arrived_s = like.arrival, like.arrived_s
        sequence.status = Status.WAITING
        self._sequences.add(sequence, self._clock())
        sequence.arrival, sequence.arrived_s = arrival, arrived_s
        if sequence.block_ids and not self._is_batch_full:
            self._sequences.run(sequence)
        else:
            self._tables.free(sequence)
            sequence.num_computed_tokens = sequence.num_cached_tokens = 0
            self._sequences.waits_first(sequence)


def _ends(sequence: EngineSequence) -> frozenset[int]:
    """Tokens that end an answer."""
    sampling = sequence.sampling
    ends = frozenset(sampling.stop_token_ids)
    return ends if sampling.ignore_eos else ends | sequence.eos_token_ids
