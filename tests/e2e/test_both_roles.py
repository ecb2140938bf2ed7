"""Two workers of both roles: they hand over to each other and to themselves, and the tokens are exact."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from shared.identity import BOTH
from shared.rpc.convert import roles_from_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import channel
from shared.seeds import SAMPLER_VERSION
from tests.e2e.stage import prompt, staged
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

NAMES = ("worker-0", "worker-1")
NUM_TOKENS = 24


class Session:
    """A router's session with a worker of the cluster, by hand."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._events: deque[worker_pb2.Event] = deque()

    async def __aenter__(self) -> Session:
        self._channel = channel(self._address)
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Session()
        await self.send(
            hello=types_pb2.Hello(
                router_name="by-hand", protocol_version=PROTOCOL_VERSION, sampler_version=SAMPLER_VERSION
            )
        )
        self.welcome = (await self.event("welcome")).welcome
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send(self, **command) -> None:
        await self._call.write(worker_pb2.Commands(commands=[worker_pb2.Command(**command)]))

    async def event(self, *kinds: str) -> worker_pb2.Event:
        """The next of these kinds; others are dropped."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                while self._events:
                    event = self._events.popleft()
                    assert event.WhichOneof("event") != "failed", event
                    if event.WhichOneof("event") in kinds:
                        return event
                self._events.extend((await self._call.read()).events)


async def test_they_hand_over_to_each_other_and_to_themselves(tmp_path):
    """By placement a worker that is chosen for both parts hands nothing over; a Submit to itself works all the same."""
    async with staged(tmp_path, num_prefill=1, num_decode=1, mode="auto") as stage:
        welcomes = {link.name: link.welcome for link in stage.fleet.links}
        assert welcomes.keys() == set(NAMES)
        assert all(roles_from_proto(welcome.roles) == BOTH for welcome in welcomes.values())
        # The same prompt, salted so that no pool has any of it, in every way through the two.
        answers, ways = [], set()
        for number, (prefill, decode) in enumerate((p, d) for p in NAMES for d in NAMES):
            stage.placement.decode = decode
            answer, summary = await stage.ask(prompt(200), prefill, tenant=f"t{number}")
            answers.append(answer)
            ways.add((summary.prefill_worker, summary.decode_worker))
        assert ways == {("", "worker-0"), ("worker-0", "worker-1"), ("worker-1", "worker-0"), ("", "worker-1")}
        assert len(answers[0]) == NUM_TOKENS
        assert answers.count(answers[0]) == len(answers)
        # By hand: a ticket of its own worker.
        assert await handed_to_itself(stage.fleet.decodes["worker-0"].address) == answers[0]
        await stage.idle()


async def handed_to_itself(address: str) -> list[int]:
    """The answer to the same prompt, handed over by the worker at `address` to itself."""
    common = {
        "token_ids": prompt(200),
        "num_prompt_tokens": 200,
        "sampling": types_pb2.SamplingParams(temperature=0.0, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True),
        "salt": "by hand",
    }
    async with Session(address) as session:
        await session.send(reserve=worker_pb2.Reserve(request_id="r#1.1", **common))
        reserved = (await session.event("reserved")).reserved
        assert reserved.needed_blocks
        await session.send(
            submit=worker_pb2.Submit(
                request_id="r#1.1.1",
                ticket=reserved.ticket,
                transfer_address=session.welcome.transfer_address,
                needed_blocks=reserved.needed_blocks,
                notes=True,
                **common,
            )
        )
        tokens = list((await session.event("first_token")).first_token.tokens.token_ids)
        while True:
            for sequence in (await session.event("step")).step.sequences:
                tokens += sequence.token_ids
                if sequence.finish_reason:
                    return tokens
