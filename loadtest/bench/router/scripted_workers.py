"""Workers without engines: real gRPC sessions, immediate answers to commands, tokens at a set pace.

`python -m loadtest.bench.router.scripted_workers --prefill 4 --decode 4 --tokens-per-s 20000 --stamps FILE` is a
process as in shared/process.py: its ready event names the workers' addresses, and at SIGTERM it writes FILE: {attempt:
[seconds, …]}, the times by `time.perf_counter()` (one clock for all processes of a machine) of four messages: Reserve
received, Reserved sent, Submit received, first token sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from loadtest.bench.router.scripted_worker import ScriptedWorker
from loadtest.rig.command_line import Option, run
from shared.process import run_process
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

NUM_BLOCKS = 1_000_000
"""More than any load needs: no request waits for a block, because only the router is measured."""


@dataclass(slots=True)
class Script:
    """The state that all workers of a fleet share."""

    tokens_per_s: float
    """Rate of the whole fleet; one token for each sequence and step."""
    num_sequences: int = 0
    """Number of running sequences that give this rate; 0 = the current number. An engine's step takes its time whether
    its router keeps up or not: with the rate alone, a few running sequences would get the tokens of delayed ones."""
    stamps: dict[str, list[float]] = field(default_factory=dict)
    hand_offs: dict[int, tuple[DecodeWorker, str, int]] = field(default_factory=dict)
    num_running: int = 0

    @property
    def step_interval_s(self) -> float:
        """Seconds between two steps of one worker."""
        return max(1, self.num_sequences or self.num_running) / self.tokens_per_s


class FleetWorker(ScriptedWorker):
    """Base of both roles: a pool that is never full, and the fleet's script."""

    max_num_seqs = NUM_BLOCKS

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType, script: Script) -> None:
        super().__init__(name, role)
        self.num_blocks = NUM_BLOCKS
        self._script = script


class PrefillWorker(FleetWorker):
    """Answers a Submit with the first token, and hands the sequence to its decode worker."""

    async def on_command(self, command: Any) -> None:
        """See ScriptedWorker."""
        if isinstance(command, worker_pb2.Submit):
            self._script.stamps[command.request_id].append(perf_counter())
            await self.finish(command, prefill_compute_ms=0.01)

    async def finish(self, submit: worker_pb2.Submit, prefill_compute_ms: float) -> None:
        """Sends the first token and starts the sequence on its decode worker."""
        tokens = types_pb2.SequenceTokens(
            request_id=submit.request_id, token_ids=[5], prefill_compute_ms=prefill_compute_ms
        )
        self._script.stamps[submit.request_id].append(perf_counter())
        await self.send(first_token=worker_pb2.FirstToken(tokens=tokens))
        decode, request_id, num_tokens = self._script.hand_offs.pop(submit.ticket)
        decode.join(request_id, num_tokens - 1)


@dataclass(slots=True)
class Sequence:
    """One sequence's part of a Step message, serialized once: a fleet has less than one core for all its tokens."""

    remaining: int
    middle: bytes
    last: bytes

    @classmethod
    def of(cls, request_id: str, num_tokens: int) -> Sequence:
        """A sequence of `num_tokens` tokens, all the same."""
        tokens = types_pb2.SequenceTokens(request_id=request_id, token_ids=[260 + num_tokens % 1000])
        middle = worker_pb2.Step(sequences=[tokens]).SerializeToString()
        tokens.finish_reason = types_pb2.FINISH_REASON_LENGTH
        return cls(num_tokens, middle, worker_pb2.Step(sequences=[tokens]).SerializeToString())


class DecodeWorker(FleetWorker):
    """Reserves at once and gives every sequence one token a step. Serves one router."""

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType, script: Script) -> None:
        super().__init__(name, role, script)
        self._sequences: dict[str, Sequence] = {}
        self._joined = asyncio.Event()

    def join(self, request_id: str, num_tokens: int) -> None:
        """The sequence's blocks have arrived; it will get `num_tokens` tokens."""
        self._sequences[request_id] = Sequence.of(request_id, num_tokens)
        self._script.num_running += 1
        self._joined.set()

    async def on_command(self, command: Any) -> None:
        """See ScriptedWorker."""
        if isinstance(command, worker_pb2.Reserve):
            await self._reserve(command)
        elif isinstance(command, types_pb2.Cancel) and self._sequences.pop(command.request_id, None) is not None:
            self._script.num_running -= 1

    async def during_session(self) -> None:
        """Runs steps on schedule: after a late step the next one follows sooner."""
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
            await self.send_bytes(step_event(b"".join(parts)))
            due = max(due + self._script.step_interval_s, perf_counter() - 0.1)
            await asyncio.sleep(max(0.0, due - perf_counter()))

    async def _reserve(self, reserve: worker_pb2.Reserve) -> None:
        came = perf_counter()
        script = self._script
        ticket = len(script.stamps) + 1
        script.hand_offs[ticket] = (self, reserve.request_id, reserve.sampling.max_tokens)
        needed = range(len(reserve.token_ids) // self.block_size)
        reserved = worker_pb2.Reserved(request_id=reserve.request_id, ticket=ticket, needed_blocks=needed)
        script.stamps[reserve.request_id] = [came, perf_counter()]
        await self.send(reserved=reserved)


def step_event(step: bytes) -> bytes:
    """An `Events` of one event around a serialized Step."""
    return _field(worker_pb2.Events.EVENTS_FIELD_NUMBER, _field(worker_pb2.Event.STEP_FIELD_NUMBER, step))


def _field(number: int, content: bytes) -> bytes:
    """A message's only field, which is a serialized message."""
    head, length = bytes((number << 3 | 2,)), len(content)
    while length > 0x7F:
        head += bytes((length & 0x7F | 0x80,))
        length >>= 7
    return head + bytes((length,)) + content


class Fleet:
    """All workers of one script as one service; see `shared.process.Service`."""

    address = ""

    def __init__(self, num_prefill: int, num_decode: int, script: Script, stamps: Path) -> None:
        self._prefills = [PrefillWorker(f"p{i}", types_pb2.WORKER_ROLE_PREFILL, script) for i in range(num_prefill)]
        self._decodes = [DecodeWorker(f"d{i}", types_pb2.WORKER_ROLE_DECODE, script) for i in range(num_decode)]
        self._script = script
        self._stamps = stamps

    async def start(self) -> Fleet:
        """Starts all workers."""
        for worker in (*self._prefills, *self._decodes):
            await worker.start()
        return self

    @property
    def endpoints(self) -> dict[str, str]:
        """`prefill` and `decode`, each in the format of the router's setting of that name."""
        return {"prefill": addresses(self._prefills), "decode": addresses(self._decodes)}

    async def close(self) -> None:
        """Stops the workers and writes their stamps."""
        for worker in (*self._prefills, *self._decodes):
            await worker.stop()
        await asyncio.to_thread(self._stamps.write_text, json.dumps(self._script.stamps))


def addresses(workers: Iterable[ScriptedWorker]) -> str:
    """`p0=127.0.0.1:40001,p1=…` of started workers: a value for the router's `--prefill` or `--decode`."""
    return ",".join(f"{worker.name}={worker.address}" for worker in workers)


def main(
    prefill: Annotated[int, Option()],
    decode: Annotated[int, Option()],
    tokens_per_s: Annotated[float, Option()],
    stamps: Annotated[Path, Option()],
    sequences: Annotated[int, Option(help="running sequences that give this rate; default: the current number")] = 0,
) -> int:
    """See the module's docstring."""
    fleet = Fleet(prefill, decode, Script(tokens_per_s, sequences), stamps)
    return run_process("scripted-fleet", fleet.start)


if __name__ == "__main__":
    run(main)
