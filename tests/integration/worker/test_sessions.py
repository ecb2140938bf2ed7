"""What routers may do to a worker's sessions: bad commands, lost streams, silence."""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import replace
from types import SimpleNamespace

import grpc.aio
import pytest

from services.router.placement.views import NO_WORK
from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.fleet import Fleet
from services.worker import session
from shared.engine.messages import EngineDied, SequenceReserved
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.errors import TransferFailed
from shared.identity import DECODE, PREFILL
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import channel
from shared.seeds import SAMPLER_VERSION
from tests.integration.worker.session_rig import PROMPT, SAMPLING, Router, said, serving
from tests.local_transfer import LocalPlane
from tests.waiting import DEADLINE_S, until

ANSWER = [7] * SAMPLING["max_tokens"]


def without(field: str) -> dict:
    return {name: value for name, value in SAMPLING.items() if name != field}


# --- poison


@pytest.mark.parametrize(
    ("field", "command"),
    [
        ("sampling.seed", {"sampling": without("seed")}),
        ("sampling.max_tokens", {"sampling": without("max_tokens")}),
        ("prompt", {"token_ids": [5, 100]}),
        ("prompt", {"num_prompt_tokens": 41}),
        ("temperature", {"sampling": {**SAMPLING, "temperature": -1.0}}),
    ],
)
async def test_a_bad_reserve_fails_its_request_alone(field, command):
    async with serving(DECODE) as worker, Router(worker) as router:
        await router.reserve("good", prefill_here=True, sampling={**SAMPLING, "max_tokens": 60})
        await router.reserve("bad", **{"prefill_here": True, **command})
        failed = (await router.event("failed")).failed
        assert (failed.request_id, failed.error.details["field"]) == ("bad", field)
        assert await router.tokens("good") == [7] * 60
        await worker.idle()


async def test_tokens_of_one_step_come_in_one_message():
    guessing = Speculator([NgramDrafter()], num_guesses=3)
    async with serving(DECODE, speculator=guessing) as worker, Router(worker) as router:
        await router.reserve("a#1", prefill_here=True, sampling={**SAMPLING, "max_tokens": 30, "logprobs": 0})
        found, most = [], 0
        while len(found) < 30:
            (tokens,) = (await router.event("step")).step.sequences
            assert len(tokens.token_ids) == len(tokens.logprobs)
            assert tokens.num_accepted == len(tokens.token_ids) - 1 <= tokens.num_guessed <= 3
            found += tokens.token_ids
            most = max(most, len(tokens.token_ids))
        assert (found, most) == ([7] * 30, 4)
        assert tokens.finish_reason == types_pb2.FINISH_REASON_LENGTH
        await worker.idle()


@pytest.mark.parametrize("prefill_here", [True, False])
async def test_a_second_reserve_with_a_running_id_does_not_end_the_worker(prefill_here):
    async with serving(DECODE) as worker, Router(worker) as router:
        worker.runner.may_step.clear()  # the first cannot end before the second comes
        await router.reserve("twice", prefill_here=prefill_here, sampling={**SAMPLING, "max_tokens": 200})
        await router.reserve("twice", prefill_here=prefill_here)
        failed = (await router.event("failed")).failed
        assert (failed.error.kind, failed.error.details["field"]) == ("InvalidRequest", "request_id")
        worker.runner.may_step.set()
        await router.reserve("next", prefill_here=True)
        assert await router.tokens("next") == ANSWER


@pytest.mark.parametrize(
    ("field", "command"),
    [
        ("ticket", {"ticket": 1 << 48}),
        ("needed_blocks", {"needed_blocks": [0, 3]}),
        ("sampling.seed", {"sampling": without("seed")}),
    ],
)
async def test_a_bad_submit_fails_its_request_alone(field, command):
    async with serving(PREFILL) as worker, Router(worker) as router:
        await router.submit("bad", **command)
        failed = (await router.event("failed")).failed
        assert (failed.request_id, failed.error.details["field"]) == ("bad", field)
        await router.submit("good")
        assert (await router.event("first_token")).first_token.tokens.token_ids == [7]


async def test_a_second_submit_with_a_running_id_does_not_end_the_worker():
    async with serving(PREFILL) as worker, Router(worker) as router:
        # Nobody takes the trailer: the first one's shipment stays open.
        await router.submit("twice", transfer_address=worker.transfer.address)
        await router.event("first_token")
        await router.submit("twice")
        assert (await router.event("failed")).failed.error.details["field"] == "request_id"
        await router.submit("next")
        assert (await router.event("first_token")).first_token.tokens.request_id == "next"


async def test_an_exception_in_one_command_fails_that_sequence_alone(monkeypatch):
    """Neither the session's check nor the scheduler expects it."""
    async with serving(DECODE) as worker, Router(worker) as router:
        scheduler = worker.engine._scheduler
        reserve = scheduler.reserve

        def broken(sequence):
            if sequence.sequence_id.endswith("poison"):
                raise AssertionError("no such thing")
            return reserve(sequence)

        monkeypatch.setattr(scheduler, "reserve", broken)
        await router.reserve("poison")
        failed = (await router.event("failed")).failed
        assert (failed.request_id, failed.error.kind) == ("poison", "Internal")
        await router.reserve("good")
        assert (await router.event("reserved")).reserved.request_id == "good"
        assert not worker.worker.died.is_set()


async def test_a_bug_in_taking_a_command_fails_its_request_and_leaves_nothing(monkeypatch):
    async with serving(DECODE) as worker, Router(worker) as router:
        build = worker.worker.build_sequence

        def broken(sequence_id, *args, **kwargs):
            if sequence_id.endswith("bug"):
                raise ZeroDivisionError
            return build(sequence_id, *args, **kwargs)

        monkeypatch.setattr(worker.worker, "build_sequence", broken)
        await router.reserve("bug")
        assert (await router.event("failed")).failed.error.kind == "Internal"
        await router.reserve("good", prefill_here=True)
        assert await router.tokens("good") == ANSWER
        await worker.idle()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_thread_that_ends_is_reported():
    async with serving(DECODE) as worker, Router(worker) as router:
        seen = []
        take = worker.worker.on_event
        worker.worker.on_event = lambda event: (seen.append(event), take(event))
        worker.runner.error = SystemError("the device fell off")
        await router.reserve("a", prefill_here=True)
        async with asyncio.timeout(DEADLINE_S):
            await worker.worker.died.wait()
        assert isinstance(seen[-1], EngineDied)
        assert seen[-1].error is worker.runner.error


# --- sessions


async def test_a_stream_without_a_hello_is_ended(monkeypatch):
    async with serving(DECODE) as worker, channel(worker.rpc.address) as link:
        call = link.stream_stream("/tandem.v1.WorkerService/Session")()
        await call.write(b"")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        monkeypatch.setattr(session, "HELLO_TIMEOUT_S", 0.05)
        silent = link.stream_stream("/tandem.v1.WorkerService/Session")()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await silent.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("other", ["e", "g", "ff"])
async def test_a_router_of_another_model_has_no_session(other):
    async with serving(DECODE) as worker:
        async with Router(worker, model_fingerprint="f") as router:
            assert router.welcome.model_fingerprint == "f"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with Router(worker, model_fingerprint=other):
                pass
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_heartbeat_may_name_traces_to_keep_and_a_worker_without_spans_drops_their_names():
    async with serving(DECODE) as worker, Router(worker, heartbeat_ms=10) as router:
        named = types_pb2.Heartbeat(kept_traces=[b"a" * 16])
        await router.send(heartbeat=named)
        await router.reserve("a", prefill_here=True)
        assert await router.tokens("a") == ANSWER
        kept = []
        worker.worker.spans = SimpleNamespace(release=kept.extend)
        await router.send(heartbeat=types_pb2.Heartbeat())
        await router.send(heartbeat=named)
        await until(lambda: kept)
        assert kept == [b"a" * 16]


@pytest.mark.parametrize("rest", [[], [b""], [b"\xff"]])
async def test_a_router_that_says_no_more_finds_its_session_ended(rest):
    """At the worst while the worker writes its first message: gRPC would never end a stream with that cut off."""
    hello = types_pb2.Hello(router_name="r", protocol_version=PROTOCOL_VERSION, sampler_version=SAMPLER_VERSION)
    commands = [said(hello=hello).SerializeToString(), *rest]

    def half_close(address: str) -> None:
        with grpc.insecure_channel(address) as link:
            open_stream = link.stream_stream("/tandem.v1.WorkerService/Session")
            for _ in range(10):
                assert list(open_stream(iter(commands), timeout=DEADLINE_S))

    async with serving(DECODE) as worker:
        await asyncio.to_thread(half_close, worker.rpc.address)
        assert not worker.worker.sessions


async def test_a_router_that_leaves_while_it_is_written_to_is_no_error(caplog):
    gc.collect()  # what earlier tests left behind says so now
    caplog.clear()
    hello = types_pb2.Hello(router_name="r", protocol_version=PROTOCOL_VERSION, sampler_version=SAMPLER_VERSION)
    async with serving(DECODE) as worker, channel(worker.rpc.address) as link:
        for _ in range(50):
            call = worker_pb2_grpc.WorkerServiceStub(link).Session()
            await call.write(said(hello=hello))
            call.cancel()
        await until(lambda: not worker.worker.sessions)
        await link.channel_ready()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_worker_that_stops_ends_the_writes_of_streams_already_over():
    """The end of the stream cancels its handler, and the worker's end cancels it again, while it waits for a write."""
    writes = asyncio.Event()

    class Stalled:
        """A stream that takes nothing."""

        def __init__(self):
            hello = types_pb2.Hello(router_name="r", protocol_version=PROTOCOL_VERSION, sampler_version=SAMPLER_VERSION)
            self.commands = [said(hello=hello)]

        async def read(self):
            return self.commands.pop() if self.commands else await asyncio.Event().wait()

        async def write(self, event):
            writes.set()
            await asyncio.Event().wait()

    async with serving(DECODE) as worker, asyncio.timeout(DEADLINE_S):
        handler = asyncio.create_task(session.SessionServer(worker.worker).serve(Stalled()))
        await writes.wait()
        handler.cancel()
        while worker.worker.sessions:
            await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        left = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        assert not [name for name in left if name.startswith("SessionServer._")]


async def test_a_newer_session_ends_the_older_one_and_frees_its_requests(caplog):
    caplog.set_level(logging.INFO, session.__name__)
    async with serving(DECODE) as worker:
        epoch = {"router_incarnation": 77}
        async with Router(worker, session=1, **epoch) as old:
            await old.reserve("a")
            await old.event("reserved")
            await worker.holds(3)
            async with Router(worker, session=2, **epoch) as new:
                await old.ended()
                await worker.idle()
                await new.reserve("a")
                await new.event("reserved")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async with Router(worker, session=1, **epoch):
                        pass
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                await worker.holds(3)
        await until(lambda: not worker.worker.sessions)
    reasons = [record.getMessage().partition(")")[2] for record in caplog.records if " gone " in record.message]
    assert reasons == [": replaced by a newer session", ""]


async def test_a_session_that_is_over_keeps_nothing_of_what_its_router_did_not_read():
    over = session.Session(1, "r")
    over.send(load=types_pb2.Load())
    over.close()
    assert not over._outbox
    assert await over.next_envelope() is None


async def test_two_routers_of_one_name_do_not_end_each_others_sessions():
    async with (
        serving(DECODE) as worker,
        Router(worker, router_incarnation=1, session=5) as first,
        Router(worker, router_incarnation=2, session=1) as second,
    ):
        for router in (first, second):
            await router.reserve("a", prefill_here=True)
            assert await router.tokens("a") == ANSWER


class _Discovery:
    """Workers that `name` replaces."""

    failure = ""

    def __init__(self, *workers) -> None:
        self.workers = workers

    def start(self, on_change) -> None:
        self._on_change = on_change

    async def close(self) -> None:
        pass

    def name(self, *workers) -> None:
        self.workers = workers
        self._on_change()


async def test_a_worker_whose_label_changes_finishes_what_it_has_of_its_router():
    async with serving(DECODE) as worker:
        here = DiscoveredWorker("w", DECODE, worker.rpc.address)
        discovery = _Discovery(here)
        fleet = Fleet("r", discovery, lambda: None, collocated=True)
        fleet.start()
        try:
            await until(lambda: fleet.links[0].connected)
            worker.runner.may_step.clear()  # it runs while the label changes
            link, got = fleet.links[0], []
            link.open("a#1", got.append, NO_WORK, num_blocks=3)
            asked = {"num_prompt_tokens": len(PROMPT), "prefill_here": True, "sampling": SAMPLING}
            link.reserve(worker_pb2.Reserve(request_id="a#1", **asked), PROMPT)
            await until(lambda: worker.role.requests)
            discovery.name(replace(here, label=("zone-a",)))
            await until(lambda: fleet.links[0].connected)
            worker.runner.may_step.set()
            await until(lambda: got and (isinstance(got[-1], Exception) or got[-1].finish_reason))
            assert [token for message in got for token in message.token_ids] == ANSWER
            link.close("a#1")
            await until(lambda: not fleet.retiring)
            assert fleet.links[0].connected
        finally:
            await fleet.close()


async def test_a_router_that_falls_silent_is_given_up():
    """Its stream stays open: nothing but its heartbeats is missing."""
    async with serving(DECODE) as worker, Router(worker, heartbeat_ms=100, give_up_ms=1500) as router:
        assert router.welcome.heartbeats
        await router.reserve("a")
        await router.event("reserved")
        for _ in range(20):  # longer than the limit
            await router.send(heartbeat=types_pb2.Heartbeat())
            await router.event("heartbeat")
        await worker.holds(3)
        await worker.idle()
        await router.ended()


async def test_heartbeats_say_whether_the_engine_has_work():
    async with serving(DECODE) as worker, Router(worker, heartbeat_ms=10) as router:
        await router.reserve("a", prefill_here=True)
        await router.tokens("a")
        async with asyncio.timeout(DEADLINE_S):
            beat = (await router.event("heartbeat")).heartbeat
            while beat.has_work or beat.num_steps < SAMPLING["max_tokens"]:
                beat = (await router.event("heartbeat")).heartbeat


async def test_a_router_that_asks_for_no_heartbeats_gets_none():
    async with serving(DECODE) as worker, Router(worker) as router:
        assert not router.welcome.heartbeats
        await router.reserve("a", prefill_here=True)
        assert await router.tokens("a") == ANSWER


async def test_a_router_that_does_not_read_loses_its_session(monkeypatch):
    monkeypatch.setattr(session, "MAX_EVENTS", 2)
    async with serving(DECODE) as worker, Router(worker) as router:
        (ours,) = worker.worker.sessions
        for _ in range(5):
            ours.send(load=types_pb2.Load())
        await router.ended()
        assert not worker.worker.sessions


# --- blocks never wait where the other side's state is known


async def test_a_router_lost_between_reserve_and_submit_leaves_no_block():
    async with serving(DECODE) as worker:
        async with Router(worker) as router:
            await router.reserve("a")
            await router.event("reserved")
            await worker.holds(3)
        await worker.idle()


async def test_a_cancel_in_the_pass_of_the_loop_that_reserved_leaves_no_block(monkeypatch):
    """The task that would receive is cancelled before its first step."""
    async with serving(DECODE) as worker, Router(worker) as router:
        taken = worker.worker.on_event
        (session,) = worker.worker.sessions
        reserved = asyncio.Event()

        def cancel_at_once(event):
            taken(event)
            if isinstance(event, SequenceReserved):
                cancel = types_pb2.Cancel(request_id="a#1")
                worker.worker.take(session, worker_pb2.Command(cancel=cancel))
                reserved.set()

        monkeypatch.setattr(worker.worker, "on_event", cancel_at_once)
        await router.reserve("a#1")
        async with asyncio.timeout(DEADLINE_S):
            await reserved.wait()
        await worker.idle()


async def test_a_cancelled_request_waits_for_its_sender_until_that_is_lost():
    async with serving(DECODE) as worker, Router(worker) as router:
        for name in ("a", "b"):
            await router.reserve(name, token_ids=[*PROMPT, 60 + ord(name) % 2])
            await router.event("reserved")
        await router.send(cancel=types_pb2.Cancel(request_id="a", peer_active=True, peer="p0"))
        await router.send(cancel=types_pb2.Cancel(request_id="b", peer_active=True, peer="p1"))
        await router.send(peer_lost=types_pb2.PeerLost(name="p0"))
        await worker.holds(3)
        await router.send(peer_lost=types_pb2.PeerLost(name="p1"))
        await worker.idle()


async def test_blocks_that_a_silent_sender_may_write_to_are_free_once_it_cannot(monkeypatch):
    async with serving(DECODE) as worker, Router(worker) as router:
        safe = asyncio.Event()
        expect, cancel = worker.transfer.expect, worker.transfer.cancel

        def expecting(*arguments):
            incoming = expect(*arguments)
            incoming.closed = safe.wait
            return incoming

        async def cancelling(ticket):
            await cancel(ticket)
            raise TransferFailed("a sender is silent", memory_lost=True)

        monkeypatch.setattr(worker.transfer, "expect", expecting)
        monkeypatch.setattr(worker.transfer, "cancel", cancelling)
        await router.reserve("a")
        await router.event("reserved")
        await router.send(cancel=types_pb2.Cancel(request_id="a"))
        await asyncio.wait_for(worker.worker.idle.wait(), DEADLINE_S)
        await router.reserve("b", prefill_here=True)
        assert await router.tokens("b") == ANSWER
        await worker.holds(3)
        safe.set()
        await worker.idle()


async def test_an_abort_towards_a_receiver_that_stopped_ends_when_the_receiver_is_lost():
    """A stopped decode worker takes nothing: the trailer of the abort waits for it."""
    plane = LocalPlane()
    async with (
        serving(DECODE, plane) as receiver,
        serving(PREFILL, plane) as worker,
        Router(worker) as router,
    ):
        await router.submit("a", transfer_address=receiver.transfer.address, needed_blocks=[0, 1])
        await router.event("first_token")
        await router.send(cancel=types_pb2.Cancel(request_id="a", peer_active=True, peer="d0"))
        lost = types_pb2.PeerLost(name="d0", transfer_address=receiver.transfer.address)
        await router.send(peer_lost=lost)
        await worker.idle()


async def test_of_a_prompt_that_is_computed_here_its_router_hears_while_it_takes_long(monkeypatch):
    """A router takes a request of which it hears nothing for long for lost."""
    monkeypatch.setattr("services.decode.role.SIGN_EVERY_S", 0.02)
    async with serving(DECODE) as worker, Router(worker) as router:
        worker.runner.may_step.clear()
        await router.reserve("slow#1", prefill_here=True)
        for _ in range(3):
            assert (await router.event("arrivals")).arrivals == worker_pb2.Arrivals(request_id="slow#1")
        worker.runner.may_step.set()
        assert len(await router.tokens("slow#1")) == SAMPLING["max_tokens"]
        await until(lambda: worker.role._signing is None)
