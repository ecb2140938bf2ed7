"""The dispatcher against a model of its workers: whatever the order of events, nobody keeps memory without an owner.

Real dispatcher, attempts, links and queue; the workers are what the links send and are told, in a loop whose clock the
test moves, so that an assignment and a time-out can fall into one pass.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.record import RequestState
from services.router.dispatch.request import Request
from services.router.dispatch.transitions import HOLDERS, Holder
from services.router.dispatch.waiting_room import DispatchConfig
from services.router.placement.moves import MoveCause
from services.router.placement.policy import Placement, PlacementConfig
from services.router.workers.discovery import StaticDiscovery
from services.router.workers.fleet import Fleet
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, TransferFailed, WorkerLost
from shared.kv.layout import LAYOUT_VERSION
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.examples import examples

QUEUE_TIMEOUT_S = 60.0
NUM_BLOCKS = 12
LAYOUT = types_pb2.BlockLayout(
    num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32", layout_version=LAYOUT_VERSION
)


class MovedClock(asyncio.SelectorEventLoop):
    """A loop whose time the test moves."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s


def reservation(request_id: str) -> str:
    """The attempt that a prefill worker's name of a request belongs to, or that of a decode worker it moves to."""
    return ".".join(request_id.split(".")[:2])


class Worker:
    """What a worker holds by the commands that it got: request ids."""

    def __init__(self, link, trailers: set[str]) -> None:
        """`trailers`: requests whose hand-off any prefill worker has closed."""
        self.link = link
        self.held: dict[str, object] = {}
        self.waiting: dict[str, str] = {}  # cancelled, by the prefill worker whose trailer it waits for
        self.joined: set[str] = set()  # their hand-off was closed before their prefill worker was lost
        self._trailers = trailers
        self.errors: list[types_pb2.Failed] = []

    def connect(self) -> None:
        welcome = types_pb2.Welcome(
            worker=types_pb2.WorkerId(name=self.link.name, incarnation=1),
            layout=LAYOUT,
            num_blocks=NUM_BLOCKS,
            max_model_len=1000,
            max_num_seqs=3,
        )
        self.link._check(welcome)
        self.link._connected(welcome)

    def lose(self) -> None:
        self.held.clear()
        self.waiting.clear()
        self.joined.clear()
        self.errors.clear()
        self.link._lost("it died")

    def take_commands(self) -> None:
        outbox = self.link._stream._outbox if self.link._stream is not None else ()
        waiting = b"".join(outbox._waiting) if outbox else b""
        if outbox:
            outbox._waiting.clear()
        for command in worker_pb2.Commands.FromString(waiting).commands:
            kind = command.WhichOneof("command")
            body = getattr(command, kind)
            if kind == "cancel":
                self._cancel(body.request_id, body.peer)
            elif kind == "reassign":
                assert self.link.name.startswith("d")
                # One that is gone here is answered by an error, on its way.
                if body.request_id not in self.held:
                    self.errors.append(types_pb2.Failed(request_id=body.request_id, error=to_proto(WorkerLost("gone"))))
            elif kind == "peer_lost":
                self.waiting = {name: peer for name, peer in self.waiting.items() if peer != body.name}
            else:
                assert kind in ("reserve", "submit")
                assert body.request_id not in self.held, "an id was used twice"
                self.held[body.request_id] = body

    def _cancel(self, request_id: str, peer: str) -> None:
        if self.link.name.startswith("p"):
            self.held.pop(request_id, None)
            self._trailers.add(reservation(request_id))
        elif self.held.pop(request_id, None) is not None and peer:
            self.waiting[request_id] = peer

    def take_trailers(self) -> None:
        for request_id in self.waiting.keys() & self._trailers:
            del self.waiting[request_id]


class RequestMachine(RuleBasedStateMachine):
    """Events in any order; `settle` runs the loop until nothing is ready."""

    @initialize(collocated=st.booleans())
    def start(self, collocated: bool) -> None:
        self.loop = MovedClock()
        asyncio.set_event_loop(self.loop)
        self.collocated = collocated
        self.next_id = 0
        self.requests = {}
        self.readers = {}
        self.loop.run_until_complete(self._build())

    async def _build(self) -> None:
        prefills = {} if self.collocated else {"p0": "h:1", "p1": "h:2"}
        self.fleet = Fleet(
            "r", StaticDiscovery.of(prefills, {"d0": "h:3", "d1": "h:4"}), self._pump, collocated=self.collocated
        )
        self.fleet._serve = lambda link: asyncio.sleep(0)  # nobody dials
        self.dispatcher = Dispatcher(
            self.fleet,
            Placement(PlacementConfig(), seed=1),
            PrefixLookup(None, self.fleet),
            DispatchConfig(
                mode="collocated" if self.collocated else "disaggregated",
                queue_timeout_s=QUEUE_TIMEOUT_S,
                max_attempts=3,
            ),
        )
        self.fleet.start()
        self.trailers: set[str] = set()
        self.workers = {link.name: Worker(link, self.trailers) for link in self.fleet.links}
        for worker in self.workers.values():
            worker.connect()

    def _pump(self) -> None:
        if hasattr(self, "dispatcher"):
            self.dispatcher.pump()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for running in list(self.requests.values()):
            self.loop.create_task(running.aclose())
        self._settle()
        assert self.dispatcher.num_active == self.dispatcher.num_waiting == 0
        for worker in self.workers.values():
            worker.take_commands()
        for worker in self.workers.values():
            worker.take_trailers()
            assert not worker.held, f"{worker.link.name} holds {set(worker.held)} for nobody"
            assert not worker.waiting, f"{worker.link.name} waits for trailers that never come: {worker.waiting}"
            assert worker.link.num_requests == 0
            assert worker.link._standing.num_open == 0
        self.loop.run_until_complete(self.fleet.close())
        self._settle()
        self.loop.close()
        asyncio.set_event_loop(None)

    def _settle(self) -> None:
        for _ in range(30):
            self.loop.run_until_complete(asyncio.sleep(0))

    def _in_loop(self, call) -> None:
        async def run() -> None:
            call()

        self.loop.run_until_complete(run())

    # --- the client

    @rule(passes=st.integers(0, 4))
    def submit(self, passes: int) -> None:
        self._submit(passes)

    @rule()
    def submit_and_decode(self) -> None:
        """A request that runs, as far as it gets: few orders of the other rules come to that."""
        self._submit(4)
        self.settle()
        running = self.requests.get(f"r{self.next_id - 1}")
        for kind in (worker_pb2.Reserve, worker_pb2.Submit, worker_pb2.Reserve):
            for name, worker in self.workers.items():
                if running is not None and isinstance(worker.held.get(running.wire_id), kind):
                    self._go_on(name, running.wire_id)
                    self._settle()
                    worker.take_commands()
            for worker in self.workers.values():
                worker.take_commands()

    def _go_on(self, name: str, request_id: str) -> None:
        """The worker's next message about a request that meets no fault."""
        tokens = types_pb2.SequenceTokens(request_id=request_id, token_ids=[51])
        event = worker_pb2.Event(step=worker_pb2.Step(sequences=[tokens]))
        if self._state_of(request_id) is RequestState.RESERVED:
            event = worker_pb2.Event(reserved=worker_pb2.Reserved(request_id=request_id, ticket=1, reassignable=True))
        elif name.startswith("p"):
            event = worker_pb2.Event(first_token=worker_pb2.FirstToken(tokens=tokens))
            del self.workers[name].held[request_id]
            self.trailers.add(request_id)
        self._in_loop(lambda: self.workers[name].link._on_event(event))

    def _submit(self, passes: int) -> None:
        request_id = f"r{self.next_id}"
        self.next_id += 1

        async def run() -> None:
            try:
                request = Request(request_id, tuple(range(9)), SamplingParams(seed=1, max_tokens=8))
                self.requests[request_id] = self.dispatcher.submit(request)
            except WorkerLost:
                return
            for _ in range(passes):
                await asyncio.sleep(0)

        self.loop.run_until_complete(run())

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), passes=st.integers(0, 3))
    def cancel(self, data, passes: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.loop.create_task(self.requests[request_id].aclose())
        for _ in range(passes):
            self.loop.run_until_complete(asyncio.sleep(0))

    @rule()
    def submit_and_cancel_before_the_first_step(self) -> None:
        async def run() -> None:
            try:
                request = Request("early", tuple(range(9)), SamplingParams(seed=1, max_tokens=8))
                running = self.dispatcher.submit(request)
            except WorkerLost:
                return
            await running.aclose()
            assert running.state is RequestState.CANCELLED

        self.loop.run_until_complete(run())

    # --- the workers

    def _hold(self, data, kind):
        """A (worker, request id) of that command at a worker, None where there is none."""
        held = [
            (name, request_id)
            for name, worker in self.workers.items()
            for request_id, body in worker.held.items()
            if isinstance(body, kind)
        ]
        return data.draw(st.sampled_from(sorted(held))) if held else None

    @rule(data=st.data(), reassignable=st.booleans())
    def reserved(self, data, reassignable: bool) -> None:
        """The answer to a Reserve or to a Reassign; one that nobody asked for changes nothing."""
        if found := self._hold(data, worker_pb2.Reserve):
            name, request_id = found
            joined = request_id in self.workers[name].joined
            answer = worker_pb2.Reserved(
                request_id=request_id, ticket=1, reassignable=reassignable, joined=joined, first_token=50
            )
            self._in_loop(lambda: self.workers[name].link._on_event(worker_pb2.Event(reserved=answer)))

    @rule(data=st.data())
    def lose_after_the_trailer(self, data) -> None:
        """A prefill worker closes a hand-off and dies before its first token is out."""
        if found := self._hold(data, worker_pb2.Submit):
            name, request_id = found
            for worker in self.workers.values():
                if isinstance(worker.held.get(reservation(request_id)), worker_pb2.Reserve):
                    worker.joined.add(reservation(request_id))
            self.trailers.add(reservation(request_id))
            self._in_loop(self.workers[name].lose)

    @rule(data=st.data(), ends=st.booleans())
    def first_token(self, data, ends: bool) -> None:
        if found := self._hold(data, worker_pb2.Submit):
            name, request_id = found
            known = self._state_of(request_id) is RequestState.SHIPPING  # by an earlier sender, whose token counts
            ends = ends and not known
            finish = types_pb2.FINISH_REASON_STOP if ends else types_pb2.FINISH_REASON_UNSPECIFIED
            tokens = types_pb2.SequenceTokens(request_id=request_id, token_ids=[50], finish_reason=finish)
            event = worker_pb2.Event(first_token=worker_pb2.FirstToken(tokens=tokens))
            del self.workers[name].held[request_id]  # its trailer leaves with the token
            self.trailers.add(reservation(request_id))
            if ends:  # and tells the decode worker
                for worker in self.workers.values():
                    worker.held.pop(reservation(request_id), None)
            self._in_loop(lambda: self.workers[name].link._on_event(event))

    def _state_of(self, request_id: str) -> RequestState | None:
        active = self.requests.get(request_id.partition("#")[0])
        return active.state if active is not None and active.wire_id == reservation(request_id) else None

    @rule()
    def refuse_to_reassign(self) -> None:
        for worker in self.workers.values():
            while worker.errors:
                event = worker_pb2.Event(failed=worker.errors.pop())
                self._in_loop(lambda worker=worker, event=event: worker.link._on_event(event))

    @precondition(lambda self: any(running.state is RequestState.DECODING for running in self.requests.values()))
    @rule(data=st.data(), name=st.sampled_from(["d0", "d1"]))
    def move(self, data, name: str) -> None:
        decoding = [each for each, running in self.requests.items() if running.state is RequestState.DECODING]
        request_id = data.draw(st.sampled_from(sorted(decoding)))
        self._in_loop(lambda: self.dispatcher.move(request_id, name, MoveCause.DRAIN))
        for worker in self.workers.values():
            worker.take_commands()

    @precondition(lambda self: any(".m" in name for worker in self.workers.values() for name in worker.held))
    @rule(data=st.data(), old=st.integers(0, 4), new=st.lists(st.sampled_from([51, 51, 51, 52]), max_size=4))
    def steps_of_a_move(self, data, old: int, new: list[int]) -> None:
        """Of the worker that the answer moves from, then of the one that it moves to, which may differ."""
        moving = {name: worker for worker in self.workers.values() for name in worker.held if ".m" in name}
        request_id = data.draw(st.sampled_from(sorted(moving)))
        for worker in self.workers.values():
            ids = [51] * old if worker is not moving[request_id] else new
            for name in [name for name in worker.held if reservation(name) == reservation(request_id)]:
                tokens = types_pb2.SequenceTokens(request_id=name, token_ids=ids)
                event = worker_pb2.Event(step=worker_pb2.Step(sequences=[tokens]))
                if ids and name in worker.held:
                    self._in_loop(lambda worker=worker, event=event: worker.link._on_event(event))
                    worker.take_commands()

    @rule(data=st.data(), ends=st.booleans())
    def step(self, data, ends: bool) -> None:
        """Also before the first token has come from the prefill worker; never before a prompt was given to one."""
        if found := self._hold(data, worker_pb2.Reserve):
            name, request_id = found
            reserve = self.workers[name].held[request_id]
            joined = request_id in self.workers[name].joined
            waiting = (None, RequestState.RESERVED, RequestState.RESUMING, RequestState.RESUMING_HELD)
            if not reserve.prefill_here and not joined and self._state_of(request_id) in waiting:
                return
            here = any(
                request_id == reservation(held)
                for other, worker in self.workers.items()
                if other.startswith("p")
                for held in worker.held
            )
            ends = ends and not here
            finish = types_pb2.FINISH_REASON_STOP if ends else types_pb2.FINISH_REASON_UNSPECIFIED
            tokens = types_pb2.SequenceTokens(request_id=request_id, token_ids=[51], finish_reason=finish)
            if ends:
                del self.workers[name].held[request_id]
            event = worker_pb2.Event(step=worker_pb2.Step(sequences=[tokens]))
            self._in_loop(lambda: self.workers[name].link._on_event(event))

    @rule(data=st.data(), mendable=st.booleans(), prefill=st.booleans())
    def failed(self, data, mendable: bool, prefill: bool) -> None:
        if found := self._hold(data, worker_pb2.Submit if prefill else worker_pb2.Reserve):
            name, request_id = found
            error = to_proto(TransferFailed("t") if mendable else InvalidRequest("i"))
            failed = types_pb2.Failed(request_id=request_id, error=error)
            del self.workers[name].held[request_id]
            self.trailers.add(reservation(request_id))
            event = worker_pb2.Event(failed=failed)
            self._in_loop(lambda: self.workers[name].link._on_event(event))

    @rule(data=st.data())
    def die_or_return(self, data) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        self._in_loop(worker.lose if worker.link.connected else worker.connect)

    @rule(data=st.data(), num_free=st.sampled_from([0, NUM_BLOCKS]), late=st.booleans())
    def report(self, data, num_free: int, late: bool) -> None:
        """A report that gives or takes room; `late`: in the pass in which the waiting ones give up."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        if not worker.link.connected:
            return
        load = types_pb2.Load(num_free_blocks=num_free, num_total_blocks=NUM_BLOCKS)
        if late:
            self.loop.now_s += QUEUE_TIMEOUT_S
        self._in_loop(lambda: worker.link._on_load(load))

    @rule()
    def settle(self) -> None:
        self._settle()
        for worker in self.workers.values():
            worker.take_commands()
        self._check_holders()

    # --- what must hold

    def _check_holders(self) -> None:
        """After the loop came to rest: workers hold for running attempts alone, and where the state's table says."""
        owners = {running.wire_id: running for running in self.requests.values() if not running.state.ended}
        num_decoding = Counter()
        for name, worker in self.workers.items():
            for held in worker.held:
                request_id = reservation(held)
                assert request_id in owners, f"{name} holds {held}, which nobody runs"
                holders = HOLDERS[owners[request_id].state]
                if name.startswith("p"):
                    assert Holder.PREFILL in holders, f"{name} holds {held} against the table"
                else:
                    num_decoding[request_id] += 1
                    most = len(holders & {Holder.DECODE, Holder.NEXT})
                    assert num_decoding[request_id] <= most, f"{name} holds {held} against the table"

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "dispatcher"):
            living = [running for running in self.requests.values() if not running.state.ended]
            assert self.dispatcher.num_active <= len(living) + 1
            assert self.dispatcher.num_waiting <= self.dispatcher.num_active


@pytest.mark.slow
def test_no_order_of_events_leaves_a_state_without_an_exit_or_memory_without_an_owner():
    run_state_machine_as_test(RequestMachine, settings=examples(150, stateful_step_count=40))
