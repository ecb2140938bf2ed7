"""A simulated worker with one or both roles: what `services/worker`, `services/prefill` and `services/decode` do with
an engine, without processes, sockets and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from loadtest.simulator.adapters import SimAdapters
from loadtest.simulator.engine import OUTPUT_TOKEN, Engine, Noise
from loadtest.simulator.fleet import WorkerSpec, World
from loadtest.simulator.reports import Reports
from loadtest.simulator.request import SimRequest
from shared.engine.messages import NewToken, StepOutput
from shared.engine.scheduler.config import MAX_UNSENT_SHARE, SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import Overloaded
from shared.identity import BOTH, Roles
from shared.kv.pool import BlockPool, OutgoingBlock, PoolEvents


@dataclass(frozen=True, slots=True)
class Calls:
    """A router's side of a request; each call arrives after a message's time."""

    on_first_token: Callable[[SimRequest, float, int], None]
    """(request, seconds since it came to the worker, cached tokens): its prompt is computed."""
    on_joined: Callable[[SimRequest], None]
    """The first token of a request on the decode worker came."""
    on_done: Callable[[SimRequest], None]
    """The last token of a request came."""


class Progress(NamedTuple):
    """Progress of one answer on a worker."""

    num_tokens: int
    """Prompt and output."""
    hashes: Sequence[bytes]
    """Hashes of the full blocks whose KV is computed."""


Reserved = Callable[[frozenset[int] | None], None]
"""Gets the indexes of the blocks that must arrive; None: there is no room."""


@dataclass(slots=True)
class _Held:
    """A request on this worker."""

    request: SimRequest
    name: str
    """Name of its sequence."""
    calls: Calls
    came_s: float
    goal: Goal
    here: bool = False
    """Its prompt is computed here, and so is its answer."""
    joined: bool = False
    has_left: bool = False
    """The router has ended the request."""
    num_cached: int = 0
    receiver: Worker | None = None
    is_asking: bool = False
    """The receiver has been asked for room, or need not be."""
    is_shipping: bool = False
    """The receiver has room, and the engine knows which blocks it needs."""
    shipped_s: float = 0.0
    """When all that was sent so far has arrived."""


class Worker:
    """Commands arrive at once: their sender waits for the message's time."""

    def __init__(
        self, world: World, name: str, spec: WorkerSpec, roles: Roles = BOTH, pool: BlockPool | None = None
    ) -> None:
        """`pool`: another one than the product's."""
        self.name, self.spec, self.roles = name, spec, roles
        self._world, self._clock = world, world.clock
        self._held: dict[str, _Held] = {}
        self._waiting: deque[tuple[SimRequest, Calls, Reserved]] = deque()  # reservations in their order
        self._link_free_s = 0.0
        self._block_s = spec.block_size * spec.kv_bytes_per_token / spec.link
        self.adapters = SimAdapters(world, spec, lambda: self.reports.adapters_changed())
        self.engine = Engine(
            world.clock,
            spec.times,
            pool or BlockPool(spec.num_blocks, spec.block_size, lambda: world.clock.now_s),
            scheduler_config(spec),
            self,
            Noise(spec.residuals, f"{world.seed}/{name}", stretch=spec.stretch),
            plans_ahead=spec.plans_ahead,
            step_by_step=world.step_by_step,
        )
        self.reports = Reports(world, name, spec, self.engine, self.adapters)

    @property
    def num_requests(self) -> int:
        """Requests that it holds anything of, or is to hold."""
        return len(self._held) + len(self._waiting)

    # --- commands

    def reserve(self, request: SimRequest, calls: Calls, answer: Reserved) -> None:
        """Takes blocks for a request whose KV will come from a prefill worker."""
        self.engine.submit(lambda: self._after_message(answer, self._reserve(request, calls)))

    def prefill_here(self, request: SimRequest, calls: Calls) -> None:
        """Computes a prompt and then its answer."""
        held = self._hold(request, calls, Goal.COMPLETION)
        held.here = True
        self._add(held, self._sequence(request, Goal.COMPLETION))

    def reserve_in_turn(self, request: SimRequest, calls: Calls, answer: Reserved) -> None:
        """Like `reserve`, but waits for room behind those that came before."""
        self._waiting.append((request, calls, answer))
        self.engine.submit(self._reserve_next)

    def submit(self, request: SimRequest, calls: Calls, receiver: Worker, needed: frozenset[int] | None) -> None:
        """Computes a prompt, sends the needed blocks to the receiver, and its first token. None: the receiver is asked
        for room when the first chunk is planned."""
        held = self._hold(request, calls, Goal.FIRST_TOKEN)
        held.receiver, held.is_asking = receiver, needed is not None
        held.is_shipping = held.is_asking
        sequence = self._sequence(request, Goal.FIRST_TOKEN, needed or frozenset(), receiver.name.encode())
        self._add(held, sequence)

    def join(self, request: SimRequest) -> None:
        """All blocks of a reserved request have arrived, and its first token; it waits for its adapter."""
        self.adapters.when_ready(request.name, lambda: self._join(request))

    def _join(self, request: SimRequest) -> None:
        def command() -> None:
            self.engine.scheduler.join(request.name, 0, {}, None)
            if request.num_output_tokens == 1:
                self._finish(self._held[request.name])

        self.engine.submit(command)

    def go_on(
        self, request: SimRequest, name: str, so_far: Progress, calls: Calls, source: Worker | None = None
    ) -> None:
        """Computes the rest of an answer under that name, behind its tokens so far; `source`: from which their blocks
        come first. Of `calls`, `on_joined` tells of its first token here."""
        held = self._hold(request, calls, Goal.COMPLETION, name)
        sequence = self._sequence(request, Goal.COMPLETION)
        sequence.sequence_id = name
        sequence.token_ids += [OUTPUT_TOKEN] * (so_far.num_tokens - request.num_prompt_tokens)
        sequence.block_hashes = list(so_far.hashes)
        missing = [block for block in so_far.hashes if self.engine.pool.find(block) is None]

        def arrived() -> None:
            self.engine.submit(lambda: self._adopt(missing))
            self._add(held, sequence)

        if source is None or not missing:
            self._add(held, sequence)
        else:
            ask_s = self.spec.wire_s
            self._clock.after(ask_s, lambda: self._clock.at(source.send_blocks(len(missing)), arrived))

    def num_tokens(self, name: str) -> int:
        """Tokens of the sequence of that name; 0 where it has ended."""
        self.engine.settle()
        sequence = self.engine.scheduler.sequences.get(name)
        return len(sequence.token_ids) if sequence is not None else 0

    def progress(self, name: str) -> Progress | None:
        """How far the answer of that name is; None where it has ended or left."""
        held = self._held.get(name)
        self.engine.settle()
        sequence = self.engine.scheduler.sequences.get(name)
        if held is None or held.has_left or sequence is None:
            return None
        num_tokens = len(sequence.token_ids)
        num_sealed = (num_tokens - 1) // self.spec.block_size  # the newest token's KV is not computed
        return Progress(num_tokens, tuple(sequence.block_hashes[:num_sealed]))

    def leave(self, name: str) -> None:
        """Cancels an answer: its router hears no more of it, and the worker ends it when the message has arrived."""
        held = self._held.get(name)
        if held is not None:
            held.has_left = True
        self._after_message(self.engine.submit, partial(self._drop, name))

    def forget(self) -> None:
        """Drops all cached prefixes."""
        self.engine.pool.clear_cache()
        self._world.index.update(self.name, self.engine.pool.drain_events())

    # --- the engine's events

    def on_started(self, sequence_id: str, num_cached_tokens: int) -> None:
        """See `EngineHost`."""
        held = self._held[sequence_id]
        held.num_cached = num_cached_tokens
        if held.name == held.request.name:  # a prompt, not an answer that moves
            held.request.num_cached_tokens = num_cached_tokens
        if held.receiver is not None and not held.is_asking:
            held.is_asking = True
            answer = partial(self._on_room, held)
            self._clock.after(self.spec.wire_s, held.receiver.reserve_in_turn, held.request, held.calls, answer)

    def on_output(self, output: StepOutput) -> None:
        """See `EngineHost`."""
        self._ship(output.blocks)
        for token in output.tokens:
            held = self._held.get(token.sequence_id)
            if held is None:
                continue  # it left while the step ran
            if held.goal is Goal.FIRST_TOKEN:
                self._on_prefilled(held)
            else:
                self._on_token(held, token)

    def on_changed(self, events: PoolEvents) -> None:
        """See `EngineHost`."""
        if events.sealed or events.evicted:
            self._world.index.update(self.name, events)
        self.reports.plan(self.spec.report_s)

    def _on_prefilled(self, held: _Held) -> None:
        del self._held[held.request.name]
        self.adapters.release(held.request.name)
        self._first_token(held)
        assert held.receiver is not None
        if held.is_shipping:
            arrives_s = max(held.shipped_s, self._clock.now_s + self.spec.wire_s)
            self._clock.at(arrives_s, held.receiver.join, held.request)

    def _on_room(self, held: _Held, needed: frozenset[int] | None) -> None:
        """The receiver has room, maybe only after the prompt was computed."""
        assert needed is not None

        def command() -> None:
            sequence = self.engine.scheduler.sequences.get(held.request.name)
            if sequence is not None:
                held.is_shipping, sequence.ship_blocks = True, needed
            else:
                assert held.receiver is not None
                self._clock.at(self.send_blocks(len(needed)), held.receiver.join, held.request)

        self.engine.submit(command)

    def _on_token(self, held: _Held, token: NewToken) -> None:
        if not held.joined:
            held.joined = True
            if held.here:
                self._first_token(held)
            if not held.has_left:
                self._after_message(held.calls.on_joined, held.request)
        if token.finish_reason is not None:
            self._finish(held)

    def _first_token(self, held: _Held) -> None:
        self._after_message(held.calls.on_first_token, held.request, self._clock.now_s - held.came_s, held.num_cached)

    def _finish(self, held: _Held) -> None:
        self._free(held)
        if not held.has_left:
            self._after_message(held.calls.on_done, held.request)

    def _drop(self, name: str) -> None:
        held = self._held.get(name)
        if held is not None:  # it has not ended meanwhile
            held.has_left = True
            self.engine.abort(name)
            self._free(held)

    def _free(self, held: _Held) -> None:
        self.adapters.release(held.name)
        del self._held[held.name]
        if self._waiting:
            self.engine.submit(self._reserve_next)

    def _adopt(self, hashes: Sequence[bytes]) -> None:
        """Blocks that have arrived, as far as there is room for them, are a cached prefix."""
        pool = self.engine.pool
        wanted = [block for block in hashes if pool.find(block) is None][: pool.num_free]
        found = pool.allocate(len(wanted))
        for block_id, block in zip(found, wanted, strict=True):
            pool.seal(block_id, block)
        pool.release(found)

    def _ship(self, blocks: Sequence[OutgoingBlock]) -> None:
        """Over one link, one message after the other, while the next step computes."""
        for sequence_id, outgoing in groupby(blocks, lambda block: block.sequence_id):
            batch = list(outgoing)
            self._held[sequence_id].shipped_s = self.send_blocks(len(batch))
            block_ids, receiver = [block.block_id for block in batch], batch[0].receiver
            self._clock.at(self._link_free_s, self._sent, block_ids, receiver)

    def send_blocks(self, num_blocks: int) -> float:
        """When blocks that are sent now, behind those before, have arrived."""
        self._link_free_s = max(self._link_free_s, self._clock.now_s) + num_blocks * self._block_s
        return self._link_free_s + self.spec.wire_s

    def _sent(self, block_ids: list[int], receiver: bytes) -> None:
        self.engine.submit(lambda: self.engine.scheduler.release(block_ids, receiver))

    # --- inside

    def _add(self, held: _Held, sequence: EngineSequence) -> None:
        """Its prompt is computed once its adapter is there; others pass it meanwhile."""
        came_s = self._clock.now_s

        def ready() -> None:
            if held.name == held.request.name:
                held.request.adapter_s = self._clock.now_s - came_s
            self.engine.submit(add)

        def add() -> None:
            if not held.has_left:
                self.engine.scheduler.add(sequence)

        self.adapters.when_ready(held.name, ready)

    def _reserve(self, request: SimRequest, calls: Calls) -> frozenset[int] | None:
        try:
            needed = self.engine.scheduler.reserve(self._sequence(request, Goal.COMPLETION))
        except Overloaded:
            return None
        self._hold(request, calls, Goal.COMPLETION)
        return frozenset(needed)

    def _reserve_next(self) -> None:
        while self._waiting:
            request, calls, answer = self._waiting[0]
            needed = self._reserve(request, calls)
            if needed is None:
                return
            self._waiting.popleft()
            self._clock.after(self.spec.wire_s, answer, needed)

    def _hold(self, request: SimRequest, calls: Calls, goal: Goal, name: str = "") -> _Held:
        name = name or request.name
        self.adapters.hold(name, request.adapter)
        held = self._held[name] = _Held(request, name, calls, self._clock.now_s, goal)
        return held

    def _after_message(self, call: Callable[..., None], *args: object) -> None:
        self._clock.after(self.spec.message_s, call, *args)

    def _sequence(
        self, request: SimRequest, goal: Goal, ship_blocks: frozenset[int] = frozenset(), receiver: bytes = b""
    ) -> EngineSequence:
        """A sequence whose blocks have the hashes that the trace gives them; its tokens are never looked at."""
        return EngineSequence(
            sequence_id=request.name,
            token_ids=[request.number] * request.num_prompt_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            hash_root=b"",
            goal=goal,
            max_tokens_total=request.num_prompt_tokens + request.num_output_tokens,
            eos_token_ids=frozenset(),
            ship_blocks=ship_blocks,
            receiver=receiver,
            block_hashes=list(request.hashes),
            retain_s=request.retain_s,
            session=request.session,
        )


def scheduler_config(spec: WorkerSpec) -> SchedulerConfig:
    """The scheduler's part of a worker."""
    return SchedulerConfig(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        output_quantile=spec.output_quantile,
        tpot_target_s=spec.tpot_target_s,
        itl_target_s=spec.itl_target_s,
        max_overtaken_s=spec.max_overtaken_s,
        max_unsent_share=MAX_UNSENT_SHARE,
    )
