"""A prefill worker that is lost before the hand-over is replaced; the decode worker keeps what it has."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from services.router.dispatch.record import RequestState
from services.router.workers.liveness import LivenessLimits
from shared.errors import PeerUnreachable, Quarantined, TransferFailed, WorkerLost
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.router_under_test import PROMPT, STOP, Router, decode_worker, prefill_worker, read
from tests.integration.router.test_heartbeats import BeatingWorker
from tests.waiting import DEADLINE_S


class Case:
    """One request whose prefill worker is known, with another one beside it."""

    def __init__(self, router: Router, prefills, decode, running) -> None:
        self.router, self.prefills, self.decode, self.running = router, prefills, decode, running

    async def submitted(self, **reserved):
        """Reserve → Reserved → Submit; sets `first` and `second`."""
        reserve = await self.decode.expect(worker_pb2.Reserve)
        await self.decode.reserved(reserve.request_id, ticket=1, needed=(0, 1), **{"reassignable": True, **reserved})
        await self.router.until(lambda: sum(worker.commands.qsize() for worker in self.prefills) == 1)
        self.first, *others = sorted(self.prefills, key=lambda worker: -worker.commands.qsize())
        self.second = others[0] if others else None
        return await self.first.expect(worker_pb2.Submit)

    async def state(self, state: RequestState) -> None:
        await self.router.until(lambda: self.running.state is state)


@contextlib.asynccontextmanager
async def case(num_prefills: int = 2, *, sampling=None, **config) -> AsyncIterator[Case]:
    prefills, decode = [prefill_worker(f"p{number}") for number in range(num_prefills)], decode_worker()
    async with Router(prefills, [decode], **config) as router:
        yield Case(router, prefills, decode, router.submit(**(sampling or {})))


async def test_another_prefill_worker_gets_the_missing_blocks_and_a_ticket_of_its_own():
    async with case() as it:
        submit = await it.submitted()
        assert submit.notes
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        assert (reassign.request_id, reassign.lost) == (submit.request_id, it.first.name)
        assert not reassign.HasField("first_token")
        assert it.running.state in (RequestState.REASSIGNING, RequestState.REASSIGNING_HELD)
        await it.decode.reserved(reassign.request_id, ticket=2, needed=(1,), reassignable=True)
        again = await it.second.expect(worker_pb2.Submit)
        assert again.request_id not in (submit.request_id, "")
        assert (again.ticket, list(again.needed_blocks)) == (2, [1])
        assert list(again.token_ids) == list(PROMPT)
        await it.second.first_token(again.request_id, 50)
        await it.decode.step(submit.request_id, 51, finish=STOP)
        assert await read(it.running) == [50, 51]
        assert it.running.record.prefill_worker == it.second.name
        assert it.running.num_attempts == 1
        assert it.decode.commands.empty()
        assert it.router.metrics.outcomes == ["retried worker_lost", "finished"]


async def test_the_clients_first_token_stays_the_lost_workers():
    """In bf16 another worker may sample another one; the decode worker gets the one that counts."""
    async with case() as it:
        submit = await it.submitted()
        await it.first.first_token(submit.request_id, 50)
        await it.state(RequestState.SHIPPING)
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        assert reassign.first_token == 50
        assert it.running.state in (RequestState.RESUMING, RequestState.RESUMING_HELD)
        await it.decode.reserved(reassign.request_id, ticket=2, needed=(), reassignable=True)
        again = await it.second.expect(worker_pb2.Submit)
        assert list(again.token_ids) == list(PROMPT)
        await it.second.first_token(again.request_id, 99)
        await it.decode.step(submit.request_id, 51)
        await it.decode.step(submit.request_id, 52, finish=STOP)
        assert await read(it.running) == [50, 51, 52]
        assert all(link.num_requests == 0 for link in it.router.fleet.links)


@pytest.mark.parametrize("token_first", [False, True])
async def test_a_prefill_worker_that_does_not_reach_the_decode_worker_is_replaced_and_the_pair_avoided(token_first):
    async with case() as it:
        submit = await it.submitted()
        if token_first:
            await it.first.first_token(submit.request_id, 50)
            await it.state(RequestState.SHIPPING)
        await it.first.failed(submit.request_id, to_proto(PeerUnreachable("nothing arrives")))
        reassign = await it.decode.expect(worker_pb2.Reassign)
        await it.decode.reserved(reassign.request_id, ticket=2, needed=(1,), reassignable=True)
        again = await it.second.expect(worker_pb2.Submit)
        await it.second.first_token(again.request_id, 50)
        await it.decode.step(submit.request_id, 51, finish=STOP)
        assert await read(it.running) == [50, 51]
        for number in range(3):
            later = it.router.submit(f"later-{number}")
            reserve = await it.decode.expect(worker_pb2.Reserve)
            await it.decode.reserved(reserve.request_id, reassignable=True)
            submit = await it.second.expect(worker_pb2.Submit)
            await it.second.first_token(submit.request_id, 60, finish=STOP)
            assert await read(later) == [60]
        assert it.first.commands.empty()


async def test_without_another_prefill_worker_the_decode_worker_computes_the_prompt():
    async with case(1) as it:
        submit = await it.submitted()
        await it.first.failed(submit.request_id, to_proto(PeerUnreachable("nothing arrives")))
        cancel = await it.decode.expect(types_pb2.Cancel)
        assert not cancel.peer_active  # no trailer comes
        reserve = await it.decode.expect(worker_pb2.Reserve)
        assert reserve.prefill_here
        await it.decode.step(reserve.request_id, 50, 51, finish=STOP)
        assert await read(it.running) == [50, 51]


async def test_what_has_arrived_is_passed_on_to_the_prefill_worker_that_serves_now():
    async with case() as it:
        submit = await it.submitted()
        report = worker_pb2.Arrivals(request_id=submit.request_id, num_arrived=3)
        await it.decode.send(arrivals=report)
        arrivals = await it.first.expect(worker_pb2.Arrivals)
        address = it.router.fleet.decodes[it.decode.name].welcome.transfer_address
        assert (arrivals.request_id, arrivals.num_arrived) == (submit.request_id, 3)
        assert arrivals.transfer_address == address
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        await it.decode.send(
            arrivals=worker_pb2.Arrivals(request_id=submit.request_id, num_arrived=3)
        )  # of the lost one
        await it.decode.reserved(reassign.request_id, ticket=2, needed=(1,), reassignable=True)
        again = await it.second.expect(worker_pb2.Submit)
        await it.decode.send(arrivals=report)
        assert (await it.second.expect(worker_pb2.Arrivals)).request_id == again.request_id


@pytest.mark.parametrize("token_first", [False, True])
async def test_a_hand_over_that_was_complete_needs_no_other_sender(token_first):
    async with case() as it:
        submit = await it.submitted()
        if token_first:
            await it.first.first_token(submit.request_id, 50)
            await it.state(RequestState.SHIPPING)
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        await it.decode.step(submit.request_id, 51)
        await it.decode.reserved(reassign.request_id, joined=True, first_token=50)
        await it.decode.step(submit.request_id, 52, finish=STOP)
        assert await read(it.running) == [50, 51, 52]
        assert it.second.commands.empty()
        assert all(link.num_requests == 0 for link in it.router.fleet.links)


@pytest.mark.parametrize("answer", ["gone", "ended", "no log-probabilities"])
async def test_a_loss_that_cannot_be_repaired_is_charged_once_and_to_the_lost_worker(answer):
    async with case(sampling={"logprobs": 1} if answer == "no log-probabilities" else {}) as it:
        await it.submitted()
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        if answer == "gone":
            await it.decode.failed(reassign.request_id, to_proto(WorkerLost("no reservation here")))
        elif answer == "ended":
            await it.decode.failed(reassign.request_id, to_proto(TransferFailed("lost with the only token")))
        else:
            await it.decode.reserved(reassign.request_id, joined=True, first_token=50)
        assert not (await it.decode.expect(types_pb2.Cancel)).peer_active
        assert (await it.decode.expect(worker_pb2.Reserve)).request_id == "r#1.2"
        assert it.running.failed_workers == {it.first.name}
        assert it.running.num_failures == 1
        assert it.router.metrics.outcomes == ["retried worker_lost"]


async def test_a_decode_worker_that_is_lost_after_the_prefill_worker_is_charged_too():
    async with case() as it:
        await it.submitted()
        await it.first.stop()
        await it.decode.expect(worker_pb2.Reassign)
        await it.decode.stop()
        await it.router.until(lambda: it.running.num_failures == 2)
        assert it.running.failed_workers == {it.first.name, it.decode.name}


async def test_a_sender_that_died_with_the_first_is_not_asked_before_it_is_known_to_be_dead():
    """Its death would be the second one at which the request is present, and quarantine it."""
    prefills = [BeatingWorker(f"p{number}", types_pb2.WORKER_ROLE_PREFILL) for number in range(3)]
    decode = BeatingWorker()
    async with Router(prefills, [decode], limits=LivenessLimits(DEADLINE_S, DEADLINE_S)) as router:
        await router.until(lambda: not any(link.suspicion for link in router.fleet.links))
        it = Case(router, prefills, decode, router.submit())
        await it.submitted()
        others = [worker for worker in prefills if worker is not it.first]
        for worker in others:
            worker.silent = True
        await it.first.stop()
        reassign = await decode.expect(worker_pb2.Reassign)
        await decode.reserved(reassign.request_id, ticket=2, needed=(1,), reassignable=True)
        chosen = it.running.record.prefill_worker
        [second, third] = sorted(others, key=lambda worker: worker.name != chosen)
        await second.stop()
        await router.until(lambda: it.running.record.prefill_worker == third.name)
        assert second.commands.empty()
        assert third.commands.empty()
        third.silent = False
        again = await third.expect(worker_pb2.Submit)
        assert (again.ticket, list(again.needed_blocks)) == (2, [1])
        await third.first_token(again.request_id, 50, finish=STOP)
        assert await read(it.running) == [50]


@pytest.mark.parametrize(("num_prefills", "reassignable"), [(1, True), (2, False)])
async def test_without_another_worker_or_an_able_decode_worker_the_request_begins_anew(num_prefills, reassignable):
    async with case(num_prefills) as it:
        await it.submitted(reassignable=reassignable)
        await it.first.stop()
        assert not (await it.decode.expect(types_pb2.Cancel)).peer_active


async def test_a_worker_that_is_lost_before_it_was_told_is_replaced_without_a_word():
    async with case() as it:
        reserve = await it.decode.expect(worker_pb2.Reserve)
        links = it.router.fleet.prefills
        (name,) = [name for name, link in links.items() if link.num_requests]
        lost, other = sorted(it.prefills, key=lambda worker: worker.name != name)
        await lost.stop()
        await it.router.until(lambda: links[other.name].num_requests == 1)
        await it.decode.reserved(reserve.request_id)
        submit = await other.expect(worker_pb2.Submit)
        await other.first_token(submit.request_id, 50, finish=STOP)
        assert await read(it.running) == [50]
        assert it.decode.commands.empty()


async def test_a_prompt_at_which_two_senders_die_meets_no_third():
    async with case(3) as it:
        await it.submitted()
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        await it.decode.reserved(reassign.request_id, ticket=2, needed=(1,), reassignable=True)
        await it.router.until(lambda: any(worker.commands.qsize() for worker in it.prefills))
        (second,) = [worker for worker in it.prefills if worker.commands.qsize()]
        await second.stop()
        with pytest.raises(Quarantined):
            await read(it.running)
        await it.decode.expect(types_pb2.Cancel)


async def test_a_sender_that_dies_before_it_was_asked_is_not_blamed():
    async with case(3) as it:
        await it.submitted()
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        chosen = it.router.fleet.prefills[it.running.record.prefill_worker]
        second = next(worker for worker in it.prefills if worker.name == chosen.name)
        await second.stop()
        await it.router.until(lambda: it.running.record.prefill_worker not in (it.first.name, second.name))
        assert it.running.failed_workers == {it.first.name, second.name}
        await it.decode.reserved(reassign.request_id, ticket=2, needed=(1,), reassignable=True)
        await it.router.until(lambda: any(worker.commands.qsize() for worker in it.prefills))


async def test_a_client_that_leaves_while_the_decode_worker_is_asked_frees_it():
    async with case() as it:
        submit = await it.submitted()
        await it.first.stop()
        await it.decode.expect(worker_pb2.Reassign)
        await it.running.aclose()
        cancel = await it.decode.expect(types_pb2.Cancel)
        assert (cancel.request_id, cancel.peer_active) == (submit.request_id, False)
        assert it.second.commands.empty()
        assert all(link.num_requests == 0 for link in it.router.fleet.links)


async def test_a_client_that_leaves_after_that_cancels_the_second_sender_by_its_own_name():
    async with case() as it:
        await it.submitted()
        await it.first.stop()
        reassign = await it.decode.expect(worker_pb2.Reassign)
        await it.decode.reserved(reassign.request_id, ticket=2, needed=(1,), reassignable=True)
        again = await it.second.expect(worker_pb2.Submit)
        await it.running.aclose()
        assert (await it.second.expect(types_pb2.Cancel)).request_id == again.request_id
        cancel = await it.decode.expect(types_pb2.Cancel)
        assert (cancel.request_id, cancel.peer) == (reassign.request_id, it.second.name)
