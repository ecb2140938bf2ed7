"""Workers without engines: real gRPC sessions, an answer to every command at once, tokens at a set pace.

`python -m loadtest.bench.router.fleet --prefill 4 --decode 4 --tokens-per-s 20000 --stamps FILE` prints the workers'
addresses as one JSON line and serves until SIGTERM; then it writes FILE: {attempt: [seconds, …]}, the moments of
`time.perf_counter()` (one clock for all processes of a machine) at which Reserve came, Reserved went, Submit came and
the first token went.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import grpc.aio
import uvloop

from shared.kv.layout import LAYOUT_VERSION
from shared.rpc.pb.tandem.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import RpcServer

NUM_BLOCKS = 1_000_000
"""So many that no request ever waits for one: it is the router that is measured."""
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
_LAYOUT = types_pb2.BlockLayout(
    num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK_SIZE, dtype="float32", layout_version=LAYOUT_VERSION
)


@dataclass(slots=True)
class Script:
    """What all workers of a fleet share."""

    tokens_per_s: float
    """Of the whole fleet; one token a sequence and step."""
    num_sequences: int = 0
    """So many give that rate; 0 = however many run. An engine's step takes its time whether its router keeps up or not:
    with the rate alone, those few that run while others are held up would get all of its tokens."""
    stamps: dict[str, list[float]] = field(default_factory=dict)
    hand_offs: dict[int, tuple[DecodeWorker, str, int]] = field(default_factory=dict)
    num_running: int = 0

    @property
    def step_interval_s(self) -> float:
        """Seconds between two steps of one worker."""
        return max(1, self.num_sequences or self.num_running) / self.tokens_per_s


class Worker(ABC):
    """One scripted worker: its server and what it says of itself."""

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType, script: Script) -> None:
        self.name = name
        self._role = role
        self._script = script
        self._server = RpcServer("127.0.0.1:0", self._register, ())

    async def start(self) -> str:
        """Returns host:port."""
        await self._server.start()
        return self._server.address

    async def stop(self) -> None:
        """Breaks all sessions."""
        await self._server.stop(0.0)

    @abstractmethod
    def _register(self, server: grpc.aio.Server) -> None:
        """Adds this worker's servicer."""

    def _welcome(self) -> types_pb2.Welcome:
        return types_pb2.Welcome(
            worker=types_pb2.WorkerId(name=self.name, incarnation=1),
            role=self._role,
            model_fingerprint="scripted",
            layout=_LAYOUT,
            transfer_address=self.name.encode(),
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_BLOCKS,
            protocol_version=PROTOCOL_VERSION,
        )


class PrefillWorker(Worker, prefill_pb2_grpc.PrefillServiceServicer):
    """Answers a Submit with the first token, and hands the sequence to its decode worker."""

    def _register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Session(  # type: ignore[override]  # noqa: N802 - gRPC's name; grpc.aio also takes a coroutine
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """See prefill.proto."""
        await anext(request_iterator)
        await context.write(prefill_pb2.PrefillEvent(welcome=self._welcome()))
        async for command in request_iterator:
            if command.WhichOneof("command") != "submit":
                continue
            submit = command.submit
            stamps = self._script.stamps[submit.request_id]
            stamps.append(perf_counter())
            tokens = types_pb2.SequenceTokens(request_id=submit.request_id, token_ids=[5], prefill_compute_ms=0.01)
            stamps.append(perf_counter())
            await context.write(prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(tokens=tokens)))
            decode, request_id, num_tokens = self._script.hand_offs.pop(submit.ticket)
            decode.join(request_id, num_tokens - 1)


@dataclass(slots=True)
class Sequence:
    """What a step says of one sequence, in bytes, since a fleet has less than a core for the tokens of a whole one."""

    remaining: int
    middle: bytes
    last: bytes

    @classmethod
    def of(cls, request_id: str, num_tokens: int) -> Sequence:
        """A sequence of `num_tokens` tokens, all the same."""
        tokens = types_pb2.SequenceTokens(request_id=request_id, token_ids=[260 + num_tokens % 1000])
        middle = decode_pb2.Step(sequences=[tokens]).SerializeToString()
        tokens.finish_reason = types_pb2.FINISH_REASON_LENGTH
        return cls(num_tokens, middle, decode_pb2.Step(sequences=[tokens]).SerializeToString())


class DecodeWorker(Worker):
    """Reserves at once and gives every sequence one token a step. Serves one router."""

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType, script: Script) -> None:
        super().__init__(name, role, script)
        self._sequences: dict[str, Sequence] = {}
        self._writing = asyncio.Lock()  # a stream takes one message at a time
        self._joined = asyncio.Event()

    def join(self, request_id: str, num_tokens: int) -> None:
        """The sequence's blocks are here; `num_tokens` are to come."""
        self._sequences[request_id] = Sequence.of(request_id, num_tokens)
        self._script.num_running += 1
        self._joined.set()

    def _register(self, server: grpc.aio.Server) -> None:
        session: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._session, decode_pb2.DecodeCommand.FromString, None
        )
        handlers = grpc.method_handlers_generic_handler("tandem.v1.DecodeService", {"Session": session})
        server.add_generic_rpc_handlers((handlers,))

    async def _session(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """See decode.proto; events are written as bytes."""
        await anext(request_iterator)
        await context.write(decode_pb2.DecodeEvent(welcome=self._welcome()).SerializeToString())
        steps = asyncio.create_task(self._step(context))
        try:
            async for command in request_iterator:
                kind = command.WhichOneof("command")
                if kind == "reserve":
                    await self._reserve(command.reserve, context)
                elif kind == "cancel" and self._sequences.pop(command.cancel.request_id, None) is not None:
                    self._script.num_running -= 1
        finally:
            steps.cancel()

    async def _reserve(self, reserve: decode_pb2.Reserve, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        came = perf_counter()
        script = self._script
        ticket = len(script.stamps) + 1
        script.hand_offs[ticket] = (self, reserve.request_id, reserve.sampling.max_tokens)
        needed = range(len(reserve.token_ids) // BLOCK_SIZE)
        reserved = decode_pb2.Reserved(request_id=reserve.request_id, ticket=ticket, needed_blocks=needed)
        script.stamps[reserve.request_id] = [came, perf_counter()]
        await self._write(context, decode_pb2.DecodeEvent(reserved=reserved).SerializeToString())

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], event: bytes) -> None:
        async with self._writing:
            await context.write(event)

    async def _step(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Keeps to its schedule: a step that was written late is followed by the next one sooner."""
        due = perf_counter()
        while True:
            if not self._sequences:
                self._joined.clear()
                await self._joined.wait()
                due = perf_counter()
            parts = []
            for request_id, sequence in list(self._sequences.items()):
                sequence.remaining -= 1
                parts.append(sequence.middle if sequence.remaining else sequence.last)
                if not sequence.remaining:
                    del self._sequences[request_id]
                    self._script.num_running -= 1
            await self._write(context, step_event(b"".join(parts)))
            due = max(due + self._script.step_interval_s, perf_counter() - 0.1)
            await asyncio.sleep(max(0.0, due - perf_counter()))


def step_event(step: bytes) -> bytes:
    """A DecodeEvent around a serialized Step."""
    head, length = bytes((decode_pb2.DecodeEvent.STEP_FIELD_NUMBER << 3 | 2,)), len(step)
    while length > 0x7F:
        head += bytes((length & 0x7F | 0x80,))
        length >>= 7
    return head + bytes((length,)) + step


async def serve(num_prefill: int, num_decode: int, script: Script, stamps: Path) -> None:
    """Runs the fleet until SIGTERM."""
    prefills = [PrefillWorker(f"p{i}", types_pb2.WORKER_ROLE_PREFILL, script) for i in range(num_prefill)]
    decodes = [DecodeWorker(f"d{i}", types_pb2.WORKER_ROLE_DECODE, script) for i in range(num_decode)]
    addresses: dict[str, dict[str, str]] = {
        "prefill": {worker.name: await worker.start() for worker in prefills},
        "decode": {worker.name: await worker.start() for worker in decodes},
    }
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print(json.dumps(addresses), flush=True)
    await ended.wait()
    for worker in (*prefills, *decodes):
        await worker.stop()
    await asyncio.to_thread(stamps.write_text, json.dumps(script.stamps))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, required=True)
    parser.add_argument("--decode", type=int, required=True)
    parser.add_argument("--tokens-per-s", type=float, required=True)
    parser.add_argument("--sequences", type=int, default=0, help="that give this rate; default: those that run")
    parser.add_argument("--stamps", type=Path, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.prefill, options.decode, Script(options.tokens_per_s, options.sequences), options.stamps))


if __name__ == "__main__":
    main()
