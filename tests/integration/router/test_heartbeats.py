"""Workers that fall silent, hang, or answer wrongly, over real sessions."""

from __future__ import annotations

import asyncio
import gc
import time

import grpc.aio
import pytest

from services.router.workers import link, sessions, worker_stream
from services.router.workers.liveness import LivenessLimits
from shared.errors import WorkerLost
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router import test_dispatch
from tests.integration.router.router_under_test import STOP, prefill_worker, read, to_second_token, to_submit
from tests.integration.router.scripted_worker import ScriptedWorker
from tests.waiting import DEADLINE_S

LIMITS = LivenessLimits(suspect_after_s=0.2, give_up_after_s=0.8)


class BeatingWorker(ScriptedWorker):
    """Sends heartbeats until it is stopped, and counts the router's."""

    def __init__(self, name: str = "d0", role=types_pb2.WORKER_ROLE_DECODE) -> None:
        super().__init__(name, role)
        self.silent = False
        self.beat = types_pb2.Heartbeat(num_steps=1)
        self.hellos: list[types_pb2.Hello] = []
        self.num_beats = 0

    def _welcome(self):
        welcome = super()._welcome()
        welcome.heartbeats = True
        return welcome

    async def _session(self, commands, context):
        async def noting():
            async for envelope in commands:
                self.hellos += [command.hello for command in envelope.commands if command.HasField("hello")]
                yield envelope

        await super()._session(noting(), context)

    async def during_session(self) -> None:
        while True:
            if not self.silent:
                await self.send(heartbeat=self.beat)
            await asyncio.sleep(0.02)

    async def on_command(self, command) -> None:
        if isinstance(command, types_pb2.Heartbeat):
            self.num_beats += 1
        else:
            await super().on_command(command)


class Router(test_dispatch.Router):
    """Gives a silent worker up within a second."""

    def __init__(self, prefills, decodes, **config) -> None:
        super().__init__(prefills, decodes, **{"limits": LIMITS, **config})

    async def __aenter__(self):
        await super().__aenter__()
        await self.until(lambda: not any(link.suspicion for link in self.fleet.links))
        return self


async def test_a_worker_that_falls_silent_gets_no_new_work_and_is_taken_back():
    prefill, decode = prefill_worker(), BeatingWorker()
    async with Router([prefill], [decode], limits=LivenessLimits(0.2, DEADLINE_S)) as router:
        decode.silent = True
        await router.until(lambda: bool(router.fleet.decodes["d0"].suspicion))
        assert router.fleet.decodes["d0"].connected
        running = router.submit()
        await router.until(lambda: router.dispatcher.num_waiting == 1)
        assert decode.commands.empty()
        decode.silent = False
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 50, finish=STOP)
        assert await read(running) == [50]
        assert len(decode.hellos) == 1
        assert decode.num_beats > 0


async def test_a_frozen_session_is_given_up_and_its_streams_go_on_elsewhere():
    """No stream breaks and gRPC answers its pings: only the heartbeats are missing."""
    prefill, first, second = prefill_worker(), BeatingWorker("d0"), BeatingWorker("d1")
    second.num_blocks = 60
    async with Router([prefill], [first, second]) as router:
        running, _ = await to_second_token(router, prefill, first)
        first.silent = True
        again = await to_submit(prefill, second)
        await prefill.first_token(again.request_id, 52)
        await second.step(again.request_id, 53, finish=STOP)
        assert await read(running) == [50, 51, 52, 53]
        assert router.metrics.outcomes == ["retried worker_lost", "finished"]


@pytest.mark.parametrize("slept_s", [0.0, 1000.0])
async def test_a_connection_that_breaks_while_the_router_was_stopped_is_no_death(monkeypatch, slept_s):
    """Its own pause lets gRPC's pings time out; two of them must not quarantine what runs."""
    offset_s = 0.0
    monkeypatch.setattr(worker_stream, "monotonic", lambda: time.monotonic() + offset_s)
    prefill, decode = prefill_worker(), BeatingWorker()
    async with Router([prefill], [decode], limits=LivenessLimits(DEADLINE_S, DEADLINE_S)) as router:
        running, _ = await to_second_token(router, prefill, decode)
        offset_s = slept_s
        await decode.stop()
        await router.until(lambda: running.num_failures == 1)
        assert bool(running.deaths) == (slept_s == 0.0)
        await running.aclose()


@pytest.mark.parametrize("dies", [True, False])
async def test_a_death_while_a_command_is_on_its_way_is_one(monkeypatch, dies):
    """gRPC says "Internal error from Core" then, as it does where the stream alone ends."""
    cut = asyncio.Event()

    async def run(self, call, run=worker_stream.WorkerStream.run):
        ends = {asyncio.create_task(run(self, call)), asyncio.create_task(cut.wait())}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, "Internal error from Core")

    monkeypatch.setattr(worker_stream.WorkerStream, "run", run)
    prefill, decode = prefill_worker(), BeatingWorker()
    async with Router([prefill], [decode], limits=LivenessLimits(DEADLINE_S, DEADLINE_S)) as router:
        running, _ = await to_second_token(router, prefill, decode)
        if dies:
            await decode.stop()
        else:
            cut.set()
        await router.until(lambda: running.num_failures == 1)
        assert bool(running.deaths) == dies
        await running.aclose()


async def test_answers_that_were_at_a_death_go_to_workers_of_their_own():
    """One of them may be the cause: beside each other both would seem to be."""
    prefill, first, *others = prefill_worker(), *(BeatingWorker(f"d{number}") for number in range(3))
    async with Router([prefill], [first, *others], limits=LivenessLimits(DEADLINE_S, DEADLINE_S)) as router:
        loads = [router.fleet.decodes[worker.name] for worker in others]
        for worker in others:
            await worker.report(num_free_blocks=0, num_total_blocks=100)  # both begin on the first
        await router.until(lambda: not any(link.load.num_free_blocks for link in loads))
        running = [(await to_second_token(router, prefill, first, name))[0] for name in ("a", "b")]
        for worker, num_free_blocks in zip(others, (100, 60), strict=True):  # more room than both need
            await worker.report(num_free_blocks=num_free_blocks, num_total_blocks=100)
        await router.until(lambda: all(link.load.num_free_blocks for link in loads))
        await first.stop()
        places = [(await worker.expect(worker_pb2.Reserve)).request_id.partition("#")[0] for worker in others]
        assert sorted(places) == ["a", "b"]
        for answer in running:
            await answer.aclose()


async def test_every_session_has_an_epoch_of_its_own():
    prefill, decode = prefill_worker(), BeatingWorker()
    async with Router([prefill], [decode]) as router:
        decode.silent = True
        await router.until(lambda: len(decode.hellos) >= 2)
        first, second = decode.hellos[:2]
        assert first.router_incarnation == second.router_incarnation != 0
        assert second.session > first.session
        assert (first.heartbeat_ms, first.give_up_ms) == (40, 800)


async def test_a_hung_engine_is_given_up_although_its_session_lives_and_gets_nothing_when_it_returns():
    prefill, hung, other = prefill_worker(), BeatingWorker("d0"), BeatingWorker("d1")
    other.num_blocks = 60
    async with Router([prefill], [hung, other]) as router:
        running, _ = await to_second_token(router, prefill, hung)
        hung.beat = types_pb2.Heartbeat(num_steps=7, has_work=True, since_turn_s=9.0, longest_step_s=0.01)
        again = await to_submit(prefill, other)
        await prefill.first_token(again.request_id, 52, finish=STOP)
        assert await read(running) == [50, 51, 52]
        await router.until(lambda: len(hung.hellos) >= 3)
        for number in range(3):
            placed = router.submit(f"new-{number}")
            assert (await other.expect(worker_pb2.Reserve)).request_id.startswith(f"new-{number}#")
            await placed.aclose()
            await other.expect(types_pb2.Cancel)
        assert hung.commands.empty()


async def test_a_cancelled_request_does_not_wait_for_a_sender_that_is_lost():
    prefill, decode = BeatingWorker("p0", types_pb2.WORKER_ROLE_PREFILL), BeatingWorker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.reserved(reserve.request_id)
        await prefill.expect(worker_pb2.Submit)
        await running.aclose()
        assert (await decode.expect(types_pb2.Cancel)).peer == "p0"
        await prefill.stop()
        lost = await decode.expect(types_pb2.PeerLost)
        assert (lost.name, lost.transfer_address) == ("p0", b"p0")


class WrongWelcome(BeatingWorker):
    """Its first Welcome cannot be understood."""

    def _welcome(self):
        welcome = super()._welcome()
        if len(self.hellos) == 1:
            welcome.layout.dtype = "float7"
            welcome.layout.num_kv_heads = 0
        return welcome


async def test_a_bad_welcome_does_not_end_the_link_for_good(monkeypatch):
    prefill, decode = prefill_worker(), WrongWelcome()
    seen = []
    monkeypatch.setattr(
        link.WorkerLink,
        "_lost",
        lambda self, reason, lost=link.WorkerLink._lost, **how: (seen.append(reason), lost(self, reason, **how)),
    )
    async with Router([prefill], [decode]) as router:
        await router.until(lambda: router.fleet.decodes["d0"].connected)
        assert len(decode.hellos) >= 2
        assert seen


async def test_a_session_that_fails_as_its_link_ends_leaves_no_error_behind():
    async def session() -> None:
        await asyncio.sleep(0)
        running[0].cancel()
        raise WorkerLost("gone")

    left: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
    running = [asyncio.create_task(sessions.outcome_of(session(), "d0"))]
    await asyncio.wait(running)
    assert running.pop().cancelled()
    gc.collect()  # a task that goes with an error which was not taken is logged then
    assert left == []


async def test_a_worker_that_reads_no_commands_loses_its_session(monkeypatch):
    monkeypatch.setattr(worker_stream, "MAX_OUTGOING", 0)
    prefill, decode = prefill_worker(), BeatingWorker()
    async with test_dispatch.Router([prefill], [decode]) as router:
        await router.until(lambda: "does not read" in router.fleet.decodes["d0"].mismatch)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_BACKOFF_S", 0.1)
