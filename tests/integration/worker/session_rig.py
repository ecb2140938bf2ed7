"""A worker of either role with everything but a model: real sessions, engine thread, scheduler and pool.

The tests speak to it as routers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc.aio
import numpy as np
import torch

from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.worker import worker
from services.worker.session import SessionServer
from shared.engine.engine import Engine
from shared.engine.plan import SampledToken, StepResult
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.speculation.speculator import GuessCounters, Speculator
from shared.identity import DECODE, PREFILL, Roles, WorkerRole
from shared.kv.checksum_weights import checksum_weights, weighted_sum
from shared.kv.hashing import ChainRoots
from shared.kv.layout import LAYOUT_VERSION, BlockLayout, KVFormat
from shared.kv.pool import BlockPool
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import RpcServer, channel
from shared.seeds import SAMPLER_VERSION
from tests.local_transfer import LocalPlane, LocalTransfer
from tests.waiting import DEADLINE_S, until

NUM_BLOCKS = 32
LAYOUT = BlockLayout(num_layers=1, block_size=16, format=KVFormat("float32", 1, 8))
PROMPT = list(range(5, 45))
WEIGHTS = checksum_weights(LAYOUT.block_bytes // 8)
SAMPLING = {"temperature": 0.0, "seed": 1, "max_tokens": 4, "ignore_eos": True}


MAKERS = {WorkerRole.PREFILL: PrefillRole, WorkerRole.DECODE: DecodeRole}


class Runner:
    """Every token is 7; a step raises what the test sets, and waits while it may not go on."""

    is_async = False

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.may_step = threading.Event()
        self.may_step.set()
        memory = np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
        view = lambda block_id: memoryview(memory[block_id])  # noqa: E731
        self.blocks = SimpleNamespace(
            incoming=lambda block_ids: list(map(view, block_ids)),
            waits_for_copies=False,
            outgoing=lambda block_ids: list(map(view, block_ids)),
            store=lambda _: None,
        )

    def launch(self, plan):
        assert self.may_step.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        sampled = tuple(
            SampledToken(7, None if spec.params.logprobs is None else 0.0)
            for item in plan.sequences
            for spec in item.samples
        )
        return SimpleNamespace(result=lambda: StepResult(sampled))

    def checksums(self, block_ids):
        return [weighted_sum(np.frombuffer(view, np.uint64), WEIGHTS) for view in self.blocks.outgoing(block_ids)]


class Worker:
    """One worker and its gRPC server."""

    def __init__(
        self,
        roles: Roles,
        plane: LocalPlane,
        guard: FleetGuard | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.guard = guard
        self.roles = roles
        self.transfer = LocalTransfer(plane)
        self.runner = Runner()
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
        self.speculator = speculator

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        await self.transfer.start()
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
        self.engine = Engine(
            Scheduler(self.pool, config, speculator=self.speculator),
            self.runner,
            lambda event: loop.call_soon_threadsafe(lambda: self.worker.on_event(event)),
        )
        host = SimpleNamespace(
            engine=self.engine,
            transfer=self.transfer,
            incarnation=5,
            fleet_key=None,
            packing=None,
            guesses=GuessCounters() if self.speculator is None else self.speculator.counters,
            seal=lambda *_: None,
            settings=SimpleNamespace(
                name="w", max_num_seqs=8, max_num_batched_tokens=64, tpot_target_ms=-1, tp=1, pp=1, ep=1
            ),
            model=SimpleNamespace(
                fingerprint="f",
                texts_digest="",
                layout=LAYOUT,
                num_blocks=NUM_BLOCKS,
                max_model_len=256,
                name="m",
                roots=ChainRoots("f", LAYOUT.format.name, LAYOUT_VERSION),
                config=SimpleNamespace(vocab_size=100, eos_token_ids=(2,)),
                kernels="torch",
                dtype=torch.float32,
                quantization="",
                weight_bytes=0,
            ),
        )
        fetches = SimpleNamespace(
            num_tokens=lambda _: 0,
            may_bring=lambda _: False,
            policy=SimpleNamespace(note_compute=lambda *_: None),
        )
        connector = SimpleNamespace(
            nodes=SimpleNamespace(silent=[], on_change=None),
            server=SimpleNamespace(num_given=0),
            fetches=fetches,
            on_event=lambda _: None,
        )
        self.worker = worker.Worker(host, None, connector, {role: MAKERS[role] for role in self.roles})
        self.sessions = SessionServer(self.worker, self.guard)
        self.rpc = RpcServer("127.0.0.1:0", self.sessions.register, ())
        await self.rpc.start()
        self.engine.start()

    @property
    def role(self):
        """The only one."""
        (role,) = self.worker._roles.values()
        return role

    async def stop(self) -> None:
        await self.rpc.stop(0.0)
        await asyncio.to_thread(self.engine.close)
        await self.transfer.close()

    async def idle(self) -> None:
        """Waits until no block is held, well before any time-out of the protocol."""
        await until(lambda: not self.pool.num_used and self.worker.idle.is_set())
        self.pool.check_integrity()

    async def holds_some(self) -> None:
        """Waits until a sequence has blocks."""
        await until(lambda: self.pool.num_used)

    async def holds(self, num_blocks: int) -> None:
        await until(lambda: self.pool.num_used == num_blocks)


def said(**command) -> worker_pb2.Commands:
    """An envelope of one command."""
    return worker_pb2.Commands(commands=[worker_pb2.Command(**command)])


class Router:
    """A router's session, by hand."""

    def __init__(self, worker: Worker, metadata: tuple[tuple[str, str], ...] = (), **hello) -> None:
        self._worker = worker
        self._metadata = metadata
        self._hello = {
            "router_name": "r",
            "protocol_version": PROTOCOL_VERSION,
            "sampler_version": SAMPLER_VERSION,
            **hello,
        }
        self._kept: list = []

    async def __aenter__(self) -> Router:
        self._channel = channel(self._worker.rpc.address)
        self.call = worker_pb2_grpc.WorkerServiceStub(self._channel).Session(metadata=self._metadata)
        await self.send(hello=types_pb2.Hello(**self._hello))
        self.welcome = (await self.event("welcome")).welcome
        return self

    async def __aexit__(self, *_) -> None:
        self.call.cancel()
        await self._channel.close()

    async def send(self, **command) -> None:
        await self.call.write(said(**command))

    async def event(self, *kinds: str):
        """The next event of these kinds; others are kept for later calls."""
        for event in self._kept:
            if event.WhichOneof("event") in kinds:
                self._kept.remove(event)
                return event
        async with asyncio.timeout(DEADLINE_S):
            while (envelope := await self.call.read()) is not grpc.aio.EOF:
                self._kept += envelope.events
                for event in envelope.events:
                    if event.WhichOneof("event") in kinds:
                        self._kept.remove(event)
                        return event
        raise AssertionError("the session ended")

    async def ended(self) -> None:
        """Waits until the worker has ended the session."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(DEADLINE_S):
                while await self.call.read() is not grpc.aio.EOF:
                    pass

    async def reserve(self, request_id: str = "a#1", *, sampling=None, **fields) -> None:
        sampling = types_pb2.SamplingParams(**(SAMPLING if sampling is None else sampling))
        given = {"token_ids": PROMPT, "num_prompt_tokens": len(PROMPT), **fields}
        await self.send(reserve=worker_pb2.Reserve(request_id=request_id, sampling=sampling, **given))

    async def submit(self, request_id: str = "a#1", *, sampling=None, **fields) -> None:
        sampling = types_pb2.SamplingParams(**(SAMPLING if sampling is None else sampling))
        given = {"token_ids": PROMPT, "num_prompt_tokens": len(PROMPT), "ticket": 9, **fields}
        await self.send(submit=worker_pb2.Submit(request_id=request_id, sampling=sampling, **given))

    async def tokens(self, request_id: str) -> list[int]:
        """All tokens of a sequence that the worker computes itself."""
        found: list[int] = []
        while True:
            for sequence in (await self.event("step")).step.sequences:
                if sequence.request_id == request_id:
                    found += sequence.token_ids
                    if sequence.finish_reason:
                        return found


@contextlib.asynccontextmanager
async def serving(
    roles: Roles,
    plane: LocalPlane | None = None,
    guard: FleetGuard | None = None,
    speculator: Speculator | None = None,
) -> AsyncIterator[Worker]:
    """A started worker."""
    worker = Worker(roles, plane or LocalPlane(), guard, speculator)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


@contextlib.asynccontextmanager
async def pools() -> AsyncIterator[SimpleNamespace]:
    """A decode worker with a reservation, and a prefill worker; nothing is held by either at the end."""
    plane = LocalPlane()
    async with (
        serving(DECODE, plane) as receiver,
        serving(PREFILL, plane) as sender,
        Router(receiver) as decode,
        Router(sender) as prefill,
    ):
        await decode.reserve("a#1")
        reserved = (await decode.event("reserved")).reserved
        yield SimpleNamespace(receiver=receiver, sender=sender, decode=decode, prefill=prefill, reserved=reserved)
        await receiver.idle()
        await sender.idle()
