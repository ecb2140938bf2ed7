"""A worker with both roles: real sessions, one engine and one pool."""

from __future__ import annotations

import pytest

from shared.identity import BOTH, DECODE, PREFILL
from shared.rpc.convert import roles_from_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.worker.session_rig import SAMPLING, Router, said, serving
from tests.local_transfer import LocalPlane

NUM_LEFT = SAMPLING["max_tokens"] - 1  # behind the first token, which the prefill role sends


async def hand_over(receiver: Router, sender: Router, address: bytes, name: str = "a#1") -> list[int]:
    """A request's tokens from the decode worker; its prompt is computed at `sender`."""
    await receiver.reserve(name)
    reserved = (await receiver.event("reserved")).reserved
    await sender.submit(
        f"{name}.1",
        ticket=reserved.ticket,
        needed_blocks=reserved.needed_blocks,
        transfer_address=address,
        notes=reserved.reassignable,
    )
    assert list((await sender.event("first_token")).first_token.tokens.token_ids) == [7]
    return await receiver.tokens(name)


async def test_two_workers_hand_over_to_each_other_and_to_themselves():
    plane = LocalPlane()
    async with (
        serving(BOTH, plane) as one,
        serving(BOTH, plane) as other,
        Router(one) as at_one,
        Router(other) as at_other,
    ):
        assert roles_from_proto(at_one.welcome.roles) == BOTH
        for receiver, sender, worker in (
            (at_one, at_other, one),
            (at_other, at_one, other),
            (at_one, at_one, one),
        ):
            assert await hand_over(receiver, sender, worker.transfer.address) == [7] * NUM_LEFT
            await one.idle()
            await other.idle()


async def test_it_computes_prompts_for_others_while_its_own_answers_run():
    plane = LocalPlane()
    async with serving(BOTH, plane) as worker, serving(DECODE, plane) as other:
        async with Router(worker) as router, Router(other) as decode:
            await router.reserve("long", prefill_here=True, sampling={**SAMPLING, "max_tokens": 150})
            assert await hand_over(decode, router, other.transfer.address) == [7] * NUM_LEFT
            assert await router.tokens("long") == [7] * 150
        await worker.idle()


async def test_a_name_is_one_sequence_on_a_session_whatever_its_role():
    async with serving(BOTH) as worker, Router(worker) as router:
        worker.runner.may_step.clear()
        await router.reserve("a")
        await router.event("reserved")
        await router.submit("a")
        failed = (await router.event("failed")).failed
        assert (failed.error.kind, failed.error.details["field"]) == ("InvalidRequest", "request_id")
        worker.runner.may_step.set()
        await router.send(cancel=types_pb2.Cancel(request_id="a"))
        await worker.idle()


async def test_the_end_of_a_session_frees_what_it_had_in_both_roles():
    async with serving(BOTH) as worker:
        async with Router(worker) as router:
            worker.runner.may_step.clear()
            await router.reserve("a")
            await router.event("reserved")
            await router.submit("b")
            await worker.holds_some()
        worker.runner.may_step.set()
        await worker.idle()


@pytest.mark.parametrize(("roles", "command"), [(DECODE, "submit"), (PREFILL, "reserve")])
async def test_a_command_of_a_role_that_it_does_not_have_fails_its_request_alone(roles, command):
    async with serving(roles) as worker, Router(worker) as router:
        await getattr(router, command)("a")
        failed = (await router.event("failed")).failed
        assert (failed.request_id, failed.error.kind) == ("a", "InvalidRequest")
        assert f"takes no {command}" in failed.error.message
        await worker.idle()


async def test_commands_of_one_envelope_are_carried_out_in_order():
    async with serving(BOTH) as worker, Router(worker) as router:
        sampling = types_pb2.SamplingParams(**SAMPLING)
        fields = {"token_ids": [5, 6, 7], "num_prompt_tokens": 3, "sampling": sampling, "prefill_here": True}
        envelope = worker_pb2.Commands()
        for name in ("a", "b", "c"):
            envelope.MergeFrom(said(reserve=worker_pb2.Reserve(request_id=name, **fields)))
        envelope.MergeFrom(said(cancel=types_pb2.Cancel(request_id="b")))
        await router.call.write(envelope)
        answers: dict[str, list[int]] = {"a": [], "c": []}
        while min(map(len, answers.values())) < SAMPLING["max_tokens"]:
            for sequence in (await router.event("step")).step.sequences:
                answers.setdefault(sequence.request_id, []).extend(sequence.token_ids)
        assert answers["a"] == answers["c"] == [7] * SAMPLING["max_tokens"]
        assert len(answers.get("b", [])) < SAMPLING["max_tokens"]
        await worker.idle()
