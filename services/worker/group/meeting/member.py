"""A further host of a group: it comes to the leader's meeting, starts this host's ranks, and ends them with the leader.

It outlives the leader's incarnations: where one is lost, or drains, it comes to the next one's meeting, and waits for
it as long as it takes; a refusal ends it. A supervisor may impose a shorter limit.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import NoReturn

from services.worker.group.meeting.frames import SILENCE_S, BrokenConnection, Frames
from services.worker.group.meeting.join_check import HANDSHAKE_S, NONCE_BYTES, check_proof, own_build, prove
from services.worker.group.rank_processes import END_TIMEOUT_S, WATCH_INTERVAL_S, RankProcess
from services.worker.group.rank_spec import RankSpec
from services.worker.machine.cores import choose_group_cores
from services.worker.settings import WorkerSettings
from shared.address import Address
from shared.collectives.cpu_group import shared_memory
from shared.collectives.several_hosts import MeetingPlace, host_memories
from shared.cores.core_choice import divide_share
from shared.errors import ConfigError, RankLost, TandemError
from shared.kernels.cpu.build import CannotBuild, choose
from shared.kernels.cpu.library import load
from shared.kv.fleet_key import FleetKey
from shared.model.weights.plan import AS_STORED, QUANTIZATIONS
from shared.process import EXIT_BUG, EXIT_REFUSED, progress_event
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import group_pb2

logger = logging.getLogger(__name__)

RETRY_S = 0.2
_WARN_INTERVAL_S = 60.0
"""Seconds between warnings that no leader answers."""
_LEADER_ENDS_S = 5.0
"""Time for a leader to end the group after a member has reported a rank's end, seconds."""

Leader = Frames[group_pb2.MemberFrame, group_pb2.LeaderFrame]


class Member:
    """Implements `shared.process.Service`. All on the event loop of the process's main thread, as the kernel ends the
    ranks with the thread that started them."""

    def __init__(self, settings: WorkerSettings, library: ctypes.CDLL, silence_s: float = SILENCE_S) -> None:
        self._settings = settings
        self._library = library
        self._silence_s = silence_s
        self._key = FleetKey.of(settings.fleet_key.get_secret_value())
        self._leader = Address.parse(settings.group_leader, "group_leader", min_port=1)
        self._is_joined = False
        self._draining = False
        self._task: asyncio.Task[None] | None = None
        self._ranks: list[RankProcess] = []

    @property
    def address(self) -> str:
        """Address of the meeting: nothing listens here."""
        return str(self._leader)

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Empty: a member has no addresses of its own."""
        return {}

    @property
    def name(self) -> str:
        """The member's name in the log."""
        return f"{self._settings.name} (host {self._settings.group_host_index})"

    async def start(self) -> None:
        """Returns when the leader has let it in and this host's ranks are started. Raises Unauthenticated, ConfigError
        as the leader refuses, RankLost where the ranks cannot be started."""
        progress_event(0.0, f"waiting for the leader at {self._leader}")
        leader = await self._join()
        self._task = asyncio.create_task(self._run(leader))

    async def close(self) -> None:
        """Waits until the leader has drained, then ends."""
        self._draining = True
        assert self._task is not None
        if self._is_joined:
            await asyncio.wait({self._task}, timeout=self._settings.drain_timeout_s + 2 * END_TIMEOUT_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self, leader: Leader) -> None:
        try:
            while True:
                await self._attend(leader)
                if self._draining:
                    return
                leader = await self._join()
        except TandemError as error:
            logger.error("%s", error)
            self._exit(EXIT_REFUSED)
        except Exception:
            logger.exception("a bug stopped this host's part of the group")
            self._exit(EXIT_BUG)

    @staticmethod
    def _exit(status: int) -> NoReturn:
        logging.shutdown()
        os._exit(status)

    async def _join(self) -> Leader:
        logged_at = time.monotonic()
        while True:
            try:
                return await self._enter()
            except (OSError, TimeoutError) as error:
                if time.monotonic() - logged_at > _WARN_INTERVAL_S:
                    logger.warning("%s still waits for the leader at %s: %s", self.name, self._leader, error)
                    logged_at = time.monotonic()
            await asyncio.sleep(RETRY_S)

    async def _enter(self) -> Leader:
        """Connects, and starts this host's ranks. Raises OSError and TimeoutError where no leader answers, RankLost
        where they cannot be started."""
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(self._leader.host, self._leader.port)
        beat = group_pb2.MemberFrame(beat=group_pb2.GroupBeat())
        leader = Frames(reader, writer, group_pb2.LeaderFrame, beat, self._silence_s)
        try:
            async with asyncio.timeout(2 * HANDSHAKE_S):
                common = await self._let_in(leader)
            try:
                self._start_ranks(common, self._settings.group_address or leader.own_host)
            except OSError as error:  # not the leader's fault: connecting again would not help
                raise RankLost(f"{self.name} cannot start its ranks: {error}") from error
        except BaseException:
            await self._end_ranks(by_s=0.0)
            await leader.close()
            raise
        self._is_joined = True
        return leader

    async def _let_in(self, leader: Leader) -> group_pb2.GroupRanks:
        """The ranks, as the leader describes them. Raises Unauthenticated, ConfigError, BrokenConnection."""
        settings = self._settings
        hello = group_pb2.MemberHello(
            build=own_build(),
            num_hosts=settings.group_hosts,
            host_index=settings.group_host_index,
            tp=settings.tp,
            pp=settings.pp,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        leader.send(group_pb2.MemberFrame(hello=hello))
        theirs = (await leader.receive()).hello
        check_proof(self._key, "leader", hello, theirs.nonce, theirs.proof)
        proof = prove(self._key, "member", hello, theirs.nonce)
        leader.send(group_pb2.MemberFrame(proof=group_pb2.GroupProof(proof=proof)))
        answer = await leader.receive()
        if answer.HasField("refusal"):
            raise from_proto(answer.refusal)
        if not answer.HasField("ranks"):
            raise BrokenConnection("the leader has not described the ranks")
        return answer.ranks

    def _start_ranks(self, common: group_pb2.GroupRanks, address: str) -> None:
        settings = self._settings
        spec = RankSpec(
            common.worker,
            0,
            common.tp,
            common.pp,
            common.ep,
            "gloo" if common.backend == "gloo" else "shm",
            tuple(common.senders),
            (),
            str(settings.model),
            common.dtype,
            common.kernels,
            "cpu",
            0,
            (),
            settings.log_format,
            settings.log_level,
            settings.group_hosts,
            MeetingPlace(common.store, common.token, address),
            next((kind for kind in QUANTIZATIONS if kind == common.quantization), AS_STORED),
            common.has_adapters,
        )
        host = settings.group_host_index
        ranks = spec.ways.ranks_of(host)
        share, topology = choose_group_cores(settings)
        descriptors = host_memories(self._library, spec.ways, host)
        try:
            descriptors.append(shared_memory())
            for rank, own in zip(ranks, divide_share(topology, share, len(ranks)), strict=True):
                self._ranks.append(RankProcess(spec.of_rank(rank, tuple(descriptors), own, spec.device)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        logger.info("%s runs ranks %d to %d of %s", self.name, ranks[0], ranks[-1], common.worker)

    async def _attend(self, leader: Leader) -> None:
        """Follows the leader's messages; returns when it ends the group or is lost, and ends the ranks."""
        watch = asyncio.create_task(self._watch_ranks(leader))
        deadline = 0.0
        try:
            async with aclosing(leader.messages()) as messages:
                async for message in messages:
                    if isinstance(message, group_pb2.GroupEnd):
                        logger.info("%s: the leader has ended the group", self.name)
                        deadline = time.monotonic() + END_TIMEOUT_S
                        break
                else:
                    logger.warning("%s has lost the leader: its ranks end", self.name)
        finally:
            watch.cancel()
            try:
                await self._end_ranks(deadline)
            finally:  # cancelled too
                self._is_joined = False
                await leader.close()

    async def _end_ranks(self, by_s: float) -> None:
        """Ends the ranks; one that still runs at that time of the monotonic clock is killed. The event loop is not
        blocked meanwhile, and the ranks end also when this call is cancelled."""
        ranks, self._ranks = self._ranks, []
        await asyncio.shield(asyncio.to_thread(_end_all, ranks, by_s))

    async def _watch_ranks(self, leader: Leader) -> None:
        """Tells the leader of the first rank that ends or is stuck."""
        while True:
            for rank in self._ranks:
                if rank.is_stuck():
                    how = "a signal has stopped it"
                    rank.kill()
                elif (status := rank.status()) is not None:
                    how = f"exit status {status}"
                else:
                    continue
                leader.send(group_pb2.MemberFrame(rank_ended=group_pb2.RankEnded(rank=rank.rank, how=how)))
                await asyncio.sleep(_LEADER_ENDS_S)
                logger.warning("%s: the leader continues without rank %d, which has ended", self.name, rank.rank)
                await leader.close()
                return
            await asyncio.sleep(WATCH_INTERVAL_S)


def _end_all(ranks: Sequence[RankProcess], by_s: float) -> None:
    for rank in ranks:
        rank.end_by(by_s)


async def start_member(settings: WorkerSettings) -> Member:
    """Raises as `Member.start`, and ConfigError without C++ kernels."""
    try:
        library = await asyncio.to_thread(lambda: load(choose()[1]))
    except CannotBuild as error:
        raise ConfigError(f"tp and pp above 1 need the C++ kernels: {error}", field="tp") from error
    member = Member(settings, library)
    await member.start()
    return member
