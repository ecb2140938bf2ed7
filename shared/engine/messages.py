"""Messages between the engine thread and its host: commands in, events out, one queue each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shared.engine.finish_reason import FinishReason
from shared.engine.plan import SampledToken
from shared.engine.sequence import EngineSequence
from shared.errors import TandemError
from shared.kv.pool import OutgoingBlock
from shared.sizing.step_time import StepKinds, StepTimes, StepWork

if TYPE_CHECKING:  # the scheduler, which imports no torch, reads this too
    from shared.kernels.lora.step import PackedAdapter


@dataclass(frozen=True, slots=True)
class AddSequence:
    """Compute a sequence here. Answer: its tokens in `StepOutput`, or `SequenceFailed`."""

    sequence: EngineSequence


@dataclass(frozen=True, slots=True)
class ReserveSequence:
    """Take blocks for a sequence whose KV will arrive. Answer: `SequenceReserved` or `SequenceFailed`."""

    sequence: EngineSequence


@dataclass(frozen=True, slots=True)
class JoinSequence:
    """Every block of a reserved sequence has arrived; `checksums` by block index as the sender computed them.

    Blocks whose checksum differs are recomputed here, with all that follow. No answer but the next tokens.
    """

    sequence_id: str
    first_token: int
    checksums: dict[int, int]
    damaged: frozenset[int] | None = None
    """Indexes of the blocks that were found damaged where they arrived; None: to be checked by the engine."""
    num_damaged: int = 0
    """Blocks that arrived damaged, those included that were sent again."""
    adapter: int = 0
    """Slot of its adapter, which may have come while the blocks did; 0: none."""


@dataclass(frozen=True, slots=True)
class AbortSequence:
    """Forget a sequence; its blocks are free when the command was handled. Unknown ids are ignored."""

    sequence_id: str


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """The sender is done with these blocks, which were for this receiver."""

    block_ids: tuple[int, ...]
    receiver: bytes = b""


@dataclass(frozen=True, slots=True)
class HoldBlocks:
    """Take a reference, for a sender, on each of these blocks that the pool has.

    Answer: `BlocksHeld`; then `ReleaseHeld` for each.
    """

    key: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReleaseHeld:
    """The sender is done with these blocks."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrepareFetch:
    """Take blocks for what is missing here of a chain. Answer: `FetchPrepared`; then `EndFetch`.

    With `room_to_compute`, only if the pool also has room for a sequence that computes the same blocks meanwhile.
    """

    key: str
    hashes: tuple[bytes, ...]
    room_to_compute: bool


@dataclass(frozen=True, slots=True)
class AdoptBlocks:
    """Blocks of a fetch have arrived; `checksums` by index in its chain, as they were where the blocks were made.

    Sound ones are cached prefix from now on; damaged ones are counted, and the `num_damaged` that were found before.
    Answer: `BlocksAdopted`.
    """

    key: str
    checksums: dict[int, int]
    num_damaged: int = 0


@dataclass(frozen=True, slots=True)
class EndFetch:
    """Give back what did not arrive. A silent sender may still write to the blocks `lost`: those stay taken until
    another `EndFetch` of the same key does not name them any more."""

    key: str
    lost: frozenset[int] = frozenset()
    """Block ids."""


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget every cached prefix; running sequences keep their blocks to themselves. Answer: `CacheFlushed`."""

    key: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Retain nothing for the sake of a session any more: see `BlockPool.close_session`. Answer: `CacheFlushed`."""

    key: str
    session: str


@dataclass(frozen=True, slots=True)
class ExpectSession:
    """A session's next turn comes that many seconds from now: see `BlockPool.expect`. No answer."""

    session: str
    next_turn_s: float


@dataclass(frozen=True, slots=True)
class SetTargets:
    """Bound steps by this time between two tokens of an answer from now on; 0 = by none. Seconds. No event follows."""

    tpot_target_s: float


@dataclass(frozen=True, slots=True)
class PlaceAdapter:
    """Fill a slot of adapters, or empty it. Sequences that are added behind it may use the slot; those that used what
    it held have ended. No answer."""

    slot: int
    adapter: PackedAdapter | None


Command = (
    AddSequence
    | ReserveSequence
    | JoinSequence
    | AbortSequence
    | ReleaseBlocks
    | HoldBlocks
    | ReleaseHeld
    | PrepareFetch
    | AdoptBlocks
    | EndFetch
    | FlushCache
    | CloseSession
    | ExpectSession
    | SetTargets
    | PlaceAdapter
)


@dataclass(frozen=True, slots=True)
class SequenceReserved:
    """Blocks are taken; `needed` are (block index, block id) pairs that must arrive, by index."""

    sequence_id: str
    needed: tuple[tuple[int, int], ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The command for this sequence failed, or its output is invalid (NumericalFault); it holds no blocks."""

    sequence_id: str
    error: TandemError


@dataclass(frozen=True, slots=True)
class FirstScheduled:
    """A sequence's first turn: how much of its prompt was cached, and when it began (time.perf_counter()).

    Sent again when a later turn finds more of the prompt in the pool.
    """

    sequence_id: str
    num_cached_tokens: int
    at: float


class BeamAnswer(NamedTuple):
    """One of the likeliest answers that a beam search found."""

    token_ids: tuple[int, ...]  # up to and including the token that ended it
    finish_reason: FinishReason
    score: float  # the sum of its log-probabilities over its length to the power of the length penalty
    logprob: float  # that sum


class NewToken(NamedTuple):
    """A token that a step produced for one sequence; of a beam search, the newest one of its best beam."""

    sequence_id: str
    token: SampledToken
    finish_reason: FinishReason | None  # set where it ends the sequence
    prompt_logprobs: tuple[SampledToken, ...] = ()  # with the first token, where they are asked for
    preempted_s: float = 0.0  # with a token that ends it: how long it waited without blocks after it had started
    beams: tuple[BeamAnswer, ...] = ()  # with the last token of a beam search: what it found, the best first
    num_guessed: int = 0  # with a step's first token of the sequence: guesses that were checked for it
    num_accepted: int = 0  # of these, right ones: the step's other tokens of the sequence


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens that one engine step produced."""

    tokens: tuple[NewToken, ...] = ()
    blocks: tuple[OutgoingBlock, ...] = ()  # to be sent to decode workers; `ReleaseBlocks` gives each back
    started: tuple[FirstScheduled, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolChanged:
    """Hashes that became findable in this worker's pool, and those that left it, since the last such event."""

    sealed: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A sequence has left; `block_hashes` are those of its sealed blocks, by place, and `kept` the places of those that
    others may want: what came by a hand-off they have."""

    block_hashes: tuple[bytes, ...]
    kept: Sequence[int]
    tenant: str = ""
    retain_s: float = 0.0  # as its sequence's
    priority: int = 0  # likewise


@dataclass(frozen=True, slots=True)
class BlocksHeld:
    """The blocks of a `HoldBlocks` that the pool has; `index` is the place in its hashes."""

    key: str
    blocks: tuple[OutgoingBlock, ...]


@dataclass(frozen=True, slots=True)
class FetchPrepared:
    """(index in the chain, block id) of the blocks to be filled; empty where nothing is missing or there is no room."""

    key: str
    missing: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BlocksAdopted:
    """Indexes of the arrived blocks that are new in the pool."""

    key: str
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """All cached blocks were dropped, or of a closed session those that nothing else retains: `num_blocks` of them."""

    key: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's state after a step or a command."""

    num_free_blocks: int
    num_growth_blocks: int  # of the free ones, what running sequences are expected to take
    num_total_blocks: int
    num_cached_blocks: int
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_swapped_out: int  # of these, sequences whose blocks were moved to host memory
    num_swapped_in: int  # of these, sequences that came back without being computed again
    num_bad_blocks: int
    # What follows changes with every step: a change of it alone is not reported.
    num_queued_pairs: int = field(default=0, compare=False)  # of query and key, in the attention of the queued tokens
    decoding: StepWork = field(default=StepWork(), compare=False)  # of a step of all running answers
    promised: StepWork = field(default=StepWork(), compare=False)  # of a step of those that are to run here
    least_slack_s: float | None = field(default=None, compare=False)  # see `Scheduler`
    step_times: StepTimes | None = field(default=None, compare=False)  # None until enough steps were measured
    step_kinds: StepKinds = field(default=StepKinds(), compare=False)  # that these were fitted to


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine thread ended on an error that is not a request's: the worker cannot serve any more."""

    error: BaseException


Event = (
    SequenceReserved
    | SequenceFailed
    | StepOutput
    | PoolChanged
    | SequenceEnded
    | BlocksHeld
    | FetchPrepared
    | BlocksAdopted
    | CacheFlushed
    | EngineLoad
    | EngineDied
)
