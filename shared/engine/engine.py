"""The step loop: one thread that owns scheduler, runner and pool."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from shared import failpoints
from shared.engine.block_exchange import BlockExchange
from shared.engine.messages import (
    AbortSequence,
    AddSequence,
    AdoptBlocks,
    BlocksAdopted,
    BlocksHeld,
    CacheFlushed,
    CloseSession,
    Command,
    EndFetch,
    EngineDied,
    EngineLoad,
    Event,
    ExpectSession,
    FetchPrepared,
    FirstScheduled,
    FlushCache,
    HoldBlocks,
    JoinSequence,
    PlaceAdapter,
    PoolChanged,
    PrepareFetch,
    ReleaseBlocks,
    ReleaseHeld,
    ReserveSequence,
    SequenceFailed,
    SequenceReserved,
    SetTargets,
    StepOutput,
)
from shared.engine.plan import LaunchedStep, StepPlan, step_work
from shared.engine.runner.block_access import BlockAccess
from shared.engine.scheduler.scheduler import Scheduler
from shared.engine.step_counters import StepCounters
from shared.errors import Internal, PromptTooLong, TandemError
from shared.kernels.lora.step import PackedAdapter
from shared.kv.pool import OutgoingBlock

logger = logging.getLogger(__name__)

INTEGRITY_CHECK_INTERVAL_S = 5.0
"""Shortest time between two integrity checks of an idle engine: a check walks every block."""


class StepRunner(Protocol):
    """Computes planned steps over one KV pool. Called by the engine thread alone."""

    @property
    def is_async(self) -> bool:
        """True where `launch` returns before the step is computed."""

    @property
    def blocks(self) -> BlockAccess:
        """The pool as the transfer plane sees it."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begins a step. One more may be launched before this one's result is taken."""

    def checksums(self, block_ids: list[int]) -> list[int]:
        """Checksums of these blocks as they are now; no step in flight may write to them."""

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Fills or empties a slot of adapters; no sequence uses it."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose result is still to be collected."""

    plan: StepPlan
    at: float  # by the engine's clock, before it was planned
    started: tuple[FirstScheduled, ...]
    step: LaunchedStep


class Engine:
    """Commands in, events out. `emit` is called from the engine thread, with events in order.

    Running ahead, a step is planned and launched while the one before runs, and only then that one's result is taken:
    the device always has its next work, and Python's time hides behind it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        emit: Callable[[Event], None],
        ahead: bool | None = None,
        steps: StepCounters | None = None,
        on_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Takes ownership of both; nothing runs before `start()`. `ahead=None`: run ahead if the device computes
        asynchronously. `steps`: counters to continue. `on_thread`: the engine's thread calls it
        first. `clock`: of how long steps take, in seconds."""
        self._clock = clock
        self._on_thread = on_thread
        self._scheduler = scheduler
        self._runner = runner
        self._exchange = BlockExchange(scheduler.pool, runner.checksums)
        self._emit = emit
        self._num_ahead = int(runner.is_async if ahead is None else ahead)
        self._launched: deque[_Launched] = deque()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_bad_blocks = 0
        self._blocked = False  # the last step could plan nothing
        self._next_check = 0.0  # time.monotonic() of the next integrity check
        self._last_load: EngineLoad | None = None
        self.steps = steps or StepCounters()
        self._busy_since: float | None = None  # by the clock, at the last result, while steps follow each other

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Hands over a command; any thread, never blocks."""
        self._commands.put(command)

    def close(self) -> None:
        """Ends the thread after the step under way; sequences left are dropped. Twice is fine."""
        if self._thread is not None:
            self._commands.put(None)
            self._thread.join()
            self._thread = None

    @property
    def blocks(self) -> BlockAccess:
        """The pool as the transfer plane sees it."""
        return self._runner.blocks

    # --- the engine thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._on_thread()
                self._report_pool()  # before the first router asks for the free blocks
                while self._take_commands():
                    self._step()
        except BaseException as error:
            self._emit(EngineDied(error))
            if not isinstance(error, TandemError):  # such a one says itself what is to be known
                raise

    def _take_commands(self) -> bool:
        """Handles what is queued, and waits for more while there is nothing to compute; False to end."""
        idle = not self._scheduler.has_work and not self._launched
        if idle and time.monotonic() >= self._next_check:
            self._scheduler.check_integrity()
            self._next_check = time.monotonic() + INTEGRITY_CHECK_INTERVAL_S
        block = idle or self._blocked
        if block:
            self._busy_since = None
        self.steps.num_turns += 1
        has_handled = False
        while True:
            self.steps.waiting = block
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                is_open = True
                break
            self.steps.waiting = False
            if command is None:
                is_open = False
                break
            self._handle(command)
            has_handled, block = True, False
        if has_handled:
            self._report_pool()
        return is_open

    def _step(self) -> None:
        if failpoints.armed:
            failpoints.strike(failpoints.ENGINE_STEP)
        now = self._clock()
        plan = self._scheduler.schedule()
        if not plan.is_empty:
            self._blocked = False
            if plan.num_prefill_tokens:
                self.steps.begins(plan.num_tokens, self._scheduler.step_fit.predicted_s(step_work(plan)))
            else:
                self.steps.begins()
            self._launched.append(_Launched(plan, now, self._first_scheduled(), self._runner.launch(plan)))
            if len(self._launched) > self._num_ahead:
                self._collect()
        elif self._launched:
            self._collect()
        else:
            # Every block is held by others (receives, sends): only a command can change that.
            self._blocked = True
            self._report_pool()

    def _collect(self) -> None:
        """Takes the oldest launched step's result."""
        step = self._launched.popleft()
        result = step.step.result()
        now = self._clock()
        # From result to result: what a sequence waits for its next token, Python's share and a step ahead included.
        begun = step.at if self._busy_since is None else self._busy_since
        self._busy_since = now
        output = self._scheduler.apply(step.plan, result, now - begun)
        plan, tokens = step.plan, output.tokens
        num_guesses = plan.num_guesses
        bursts: list[int] = []
        if num_guesses:
            bursts = [count for count in Counter(token.sequence_id for token in tokens).values() if count > 1]
        self.steps.add(plan.num_tokens, len(tokens), now - begun, plan.num_prefill_tokens, num_guesses, bursts)
        if step.started or output.tokens or output.blocks:
            self._emit(StepOutput(output.tokens, self._with_checksums(output.blocks), step.started))
        self._report_pool()

    def _handle(self, command: Command) -> None:
        match command:
            case AddSequence(sequence):
                if failpoints.armed:
                    failpoints.strike_token(sequence.token_ids)
                self._guarded(sequence.sequence_id, lambda: self._add(command))
            case ReserveSequence(sequence):
                if failpoints.armed:
                    failpoints.strike_token(sequence.token_ids)
                self._guarded(sequence.sequence_id, lambda: self._reserve(command))
            case JoinSequence(sequence_id):
                self._guarded(sequence_id, lambda: self._join(command))
            case AbortSequence(sequence_id):
                self._scheduler.abort(sequence_id)
            case ReleaseBlocks(block_ids, receiver):
                self._scheduler.release(block_ids, receiver)
            case HoldBlocks(key, hashes):
                self._emit(BlocksHeld(key, self._with_checksums(self._exchange.hold(key, hashes))))
            case ReleaseHeld(block_ids):
                self._scheduler.pool.release(block_ids)
            case PrepareFetch(key, hashes, room_to_compute):
                # One block a running sequence stays free, as where a sequence starts.
                spare = self._scheduler.sequences.num_running
                self._emit(FetchPrepared(key, self._exchange.prepare(key, hashes, spare, 1 + room_to_compute)))
            case AdoptBlocks(key, checksums, num_damaged):
                self._emit(BlocksAdopted(key, self._exchange.adopt(key, checksums, num_damaged)))
            case EndFetch(key, lost):
                self._exchange.end(key, lost)
            case PlaceAdapter(slot, adapter):
                self._runner.place_adapter(slot, adapter)
            case SetTargets(tpot_target_s):
                self._scheduler.set_tpot_target(tpot_target_s)
            case FlushCache(key):
                num_blocks = self._scheduler.pool.num_cached
                self._scheduler.pool.clear_cache()
                self._report_pool()
                self._emit(CacheFlushed(key, num_blocks))
            case CloseSession(key, session):
                self._emit(CacheFlushed(key, self._scheduler.pool.close_session(session)))
            case ExpectSession(session, next_turn_s):
                self._scheduler.pool.expect(session, next_turn_s)

    def _guarded(self, sequence_id: str, action: Callable[[], None]) -> None:
        try:
            action()
        except TandemError as error:
            self._emit(SequenceFailed(sequence_id, error))
        except Exception as error:
            # A bug, or a command that should have been refused earlier: it fails this sequence, not the worker.
            logger.exception("a command for sequence %s", sequence_id)
            self._scheduler.abort(sequence_id)
            self._emit(SequenceFailed(sequence_id, Internal(f"{type(error).__name__}: {error}")))

    def _add(self, command: AddSequence) -> None:
        self._check_fits(command.sequence.max_kv_tokens)
        self._scheduler.add(command.sequence)

    def _reserve(self, command: ReserveSequence) -> None:
        sequence = command.sequence
        self._check_fits(sequence.max_kv_tokens)
        needed = self._scheduler.reserve(sequence)
        pairs = tuple((index, sequence.block_ids[index]) for index in needed)
        self._emit(SequenceReserved(sequence.sequence_id, pairs, sequence.num_cached_tokens))

    def _check_fits(self, max_kv_tokens: int) -> None:
        scheduler = self._scheduler
        capacity = scheduler.groups.max_tokens(scheduler.pool.num_blocks, scheduler.config.max_num_batched_tokens)
        if max_kv_tokens > capacity:
            raise PromptTooLong(
                f"the request takes {max_kv_tokens} tokens, this worker's KV pool holds {capacity}",
                field="max_tokens",
                limit=capacity,
            )

    def _join(self, command: JoinSequence) -> None:
        sequence = self._scheduler.sequences.get(command.sequence_id)
        if sequence is None:
            return  # cancelled meanwhile
        sequence.adapter = command.adapter or sequence.adapter
        bad = command.damaged
        if bad is None:
            indexes = sorted(command.checksums)
            arrived = self._runner.checksums([sequence.block_ids[index] for index in indexes])
            bad = frozenset(i for i, found in zip(indexes, arrived, strict=True) if found != command.checksums[i])
        self._num_bad_blocks += max(command.num_damaged, len(bad))
        self._scheduler.join(command.sequence_id, command.first_token, command.checksums, min(bad) if bad else None)

    def _first_scheduled(self) -> tuple[FirstScheduled, ...]:
        now = time.perf_counter()
        return tuple(FirstScheduled(name, num_cached, now) for name, num_cached in self._scheduler.take_started())

    def _with_checksums(self, blocks: tuple[OutgoingBlock, ...]) -> tuple[OutgoingBlock, ...]:
        """Computes the checksums that are missing; a sealed block's is computed once and kept in the pool."""
        pool = self._scheduler.pool
        missing = [block.block_id for block in blocks if block.known_checksum is None]
        if not missing:
            return blocks
        computed = dict(zip(missing, self._runner.checksums(missing), strict=True))
        for block_id, checksum in computed.items():
            if pool.hash_of(block_id) is not None:
                pool.set_checksum(block_id, checksum)
        return tuple(
            block if block.known_checksum is not None else replace(block, known_checksum=computed[block.block_id])
            for block in blocks
        )

    def _report_pool(self) -> None:
        for failed in self._scheduler.take_failed():
            self._emit(failed)
        events = self._scheduler.pool.drain_events()
        if events.sealed or events.evicted:
            self._emit(PoolChanged(tuple(events.sealed), tuple(events.evicted)))
        for ended in self._scheduler.take_ended():
            self._emit(ended)
        load = self._load()
        if load != self._last_load:
            self._last_load = load
            self._emit(load)

    def _load(self) -> EngineLoad:
        scheduler, work = self._scheduler, self._scheduler.sequences.work
        return EngineLoad(
            num_free_blocks=scheduler.pool.num_free,
            num_growth_blocks=scheduler.num_growth_blocks,
            num_total_blocks=scheduler.pool.num_blocks,
            num_cached_blocks=scheduler.pool.num_cached,
            num_running=scheduler.sequences.num_running,
            num_waiting=scheduler.sequences.num_waiting,
            num_queued_tokens=work.num_queued_tokens,
            num_prompt_tokens=scheduler.counters.num_prompt_tokens,
            num_prefix_hit_tokens=scheduler.counters.num_prefix_hit_tokens,
            num_preemptions=scheduler.counters.num_preemptions,
            num_swapped_out=scheduler.counters.num_swapped_out,
            num_swapped_in=scheduler.counters.num_swapped_in,
            num_bad_blocks=self._num_bad_blocks + self._exchange.num_bad_blocks,
            num_queued_pairs=work.num_queued_pairs,
            decoding=work.decoding,
            promised=work.promised,
            least_slack_s=scheduler.least_slack_s(work.decoding),
            step_times=scheduler.step_fit.times,
            step_kinds=scheduler.step_fit.kinds,
        )
