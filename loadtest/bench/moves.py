"""`python -m loadtest.bench moves`: the pause in an answer that moves to another decode worker."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import grpc.aio

from loadtest.rig.command_line import Option, Out
from loadtest.rig.markdown import table
from loadtest.rig.measure import percentile, turns
from loadtest.rig.results import Report, Result
from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.record import RequestState
from services.router.dispatch.request import Request
from services.router.dispatch.waiting_room import DispatchConfig
from services.router.placement.moves import MoveCause
from services.router.placement.policy import Placement, PlacementConfig
from services.router.views.moves import MoveAccount, MoveOutcome, move_accounts
from services.router.workers.discovery import StaticDiscovery
from services.router.workers.fleet import Fleet
from shared.engine.sampling_params import SamplingParams
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc

POOL = ("decode-0", "decode-1")
POLL_S = 0.005
AROUND_S = 0.25
"""A gap this soon behind the end of the old worker counts as one of the move, as in an undisturbed stretch so long."""
MAX_TOKENS = 1700


@dataclass(slots=True, eq=False)
class Stream:
    """One answer, and when its tokens came."""

    active: ActiveRequest
    came_at: list[float] = field(default_factory=list)

    async def read(self) -> None:
        """Until it ends or is closed; raises the TandemError that it fails with."""
        while not self.active.ended:
            reader = asyncio.get_running_loop().create_future()
            self.active.notify(reader)
            await reader
            if self.active.take() is not None:
                self.came_at.append(time.perf_counter())

    def greatest_gap_s(self, begin: float) -> float | None:
        """Between two tokens, of the gaps that overlap the AROUND_S from `begin` on; None behind the last token."""
        end = begin + AROUND_S
        gaps = [after - before for before, after in pairwise(self.came_at) if before <= end and begin <= after]
        return max(gaps, default=None)


@dataclass(slots=True)
class Measured:
    """Seconds, one for each stretch of AROUND_S."""

    moved_s: list[float] = field(default_factory=list)
    quiet_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    """From the request for a move until the old worker was out."""
    itl_s: list[float] = field(default_factory=list)


def main(
    model: Annotated[Path, Option(help="model folder")] = Path("models/demo"),
    answers: Annotated[int, Option(help="answers that run all the time")] = 4,
    moves: Annotated[int, Option(help="moves of a round, one after the other")] = 20,
    rounds: Annotated[int, Option(help="rounds, each with and without moves, in turns")] = 4,
    prompt: Annotated[int, Option(help="tokens of each prompt")] = 256,
    out: Out = None,
) -> None:
    """Measure the greatest gap between two tokens of answers that move, beside answers that stay."""
    with tempfile.TemporaryDirectory(prefix="tandem-moves-") as scratch:
        spec = ClusterSpec(
            model=model, mode="collocated", num_prefill=0, num_decode=2, dtype="fp32", http="127.0.0.1:0",
            grpc="127.0.0.1:0", state_dir=Path(scratch),
        )  # fmt: skip
        measured = asyncio.run(measure(spec, answers, moves, rounds, prompt))
    found = results(measured)
    print(f"{len(measured.moved_s)} moves of {answers} answers behind prompts of {prompt} tokens\n")
    print(table(("figure", "ms"), [(result.name, f"{result.value:.1f}") for result in found]))
    Report(out).add(found)


def results(measured: Measured) -> list[Result]:
    """The figures for scripts."""
    found = [Result("ITL p50", percentile(measured.itl_s, 50) * 1e3, "ms")]
    for name, values in (
        ("greatest gap, moved", measured.moved_s),
        ("greatest gap, not moved", measured.quiet_s),
        ("a move until the old worker is out", measured.took_s),
    ):
        found += [Result(f"{name}, p{percent}", percentile(values, percent) * 1e3, "ms") for percent in (50, 90, 99)]
    return found


async def measure(spec: ClusterSpec, num_answers: int, num_moves: int, rounds: int, prompt_len: int) -> Measured:
    """Starts the cluster, and reaches its workers by a router within this process."""
    measured = Measured()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(spec))
        workers = StaticDiscovery.of({}, await _addresses(cluster))
        fleet = Fleet("moves", workers, lambda: dispatcher.pump(), collocated=True)
        stack.push_async_callback(fleet.close)
        dispatcher = Dispatcher(
            fleet, Placement(PlacementConfig()), PrefixLookup(None, fleet), DispatchConfig(mode="collocated")
        )
        fleet.start()
        while not all(link.connected for link in fleet.links):  # noqa: ASYNC110 - started a moment ago
            await asyncio.sleep(POLL_S)
        for number, is_moving in turns((True, False), rounds + 1):
            streams = await _streams(dispatcher, num_answers, prompt_len, number)
            await (_moves(dispatcher, streams, num_moves) if is_moving else asyncio.sleep(num_moves * AROUND_S))
            for stream in streams:
                await stream.active.aclose()
            if number:  # the first round warms up
                _note(streams, measured)
    return measured


async def _addresses(cluster: LocalCluster) -> dict[str, str]:
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        status = await stub.GetStatus(inference_pb2.GetStatusRequest())
    return {worker.worker.name: worker.address for worker in status.workers}


async def _streams(dispatcher: Dispatcher, count: int, prompt_len: int, seed: int) -> list[Stream]:
    """Answers that have begun. Raises what one failed with before."""
    streams = []
    for number in range(count):
        tokens = tuple(20 + (i * (37 + 2 * number + seed)) % 2000 for i in range(prompt_len))
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=MAX_TOKENS, ignore_eos=True)
        request = Request(uuid.uuid4().hex, tokens, params, arrived_at=time.perf_counter())
        streams.append(Stream(dispatcher.submit(request)))
    readers = [asyncio.create_task(stream.read()) for stream in streams]
    while any(len(stream.came_at) < 10 for stream in streams):
        for reader in readers:
            if reader.done():
                reader.result()
        await asyncio.sleep(POLL_S)
    return streams


async def _moves(dispatcher: Dispatcher, streams: Sequence[Stream], count: int) -> None:
    for number in range(count):
        active = streams[number % len(streams)].active
        other = POOL[active.record.decode_worker == POOL[0]]
        if active.state is RequestState.DECODING:
            dispatcher.move(active.request.request_id, other, MoveCause.RESCUE)
        await asyncio.sleep(AROUND_S)


def _note(streams: Sequence[Stream], measured: Measured) -> None:
    for stream in streams:
        accounts = [account for account in move_accounts(stream.active.record) if _is_whole(account)]
        for account in accounts:
            gap_s = stream.greatest_gap_s(account.ended_at)
            if gap_s is not None:
                measured.moved_s.append(gap_s)
                measured.took_s.append(account.ended_at - account.began_at)
        if accounts or len(stream.came_at) < 2:
            continue
        measured.itl_s += [after - before for before, after in pairwise(stream.came_at)]
        begin = stream.came_at[0]
        while begin + AROUND_S < stream.came_at[-1]:
            gap_s = stream.greatest_gap_s(begin)
            measured.quiet_s += [gap_s] if gap_s is not None else []
            begin += AROUND_S


def _is_whole(account: MoveAccount) -> bool:
    return account.outcome is MoveOutcome.MOVED
