"""The leader's side of its group's meeting: members of the other hosts join, and while they stay their ranks live."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Collection
from dataclasses import replace

from google.protobuf.message import Message

from services.worker.group.meeting.frames import SILENCE_S, BrokenConnection, Frames
from services.worker.group.meeting.join_check import HANDSHAKE_S, NONCE_BYTES, GroupShape, check_proof, prove
from services.worker.group.rank_processes import END_TIMEOUT_S
from services.worker.group.rank_spec import RankSpec
from services.worker.settings import WorkerSettings
from shared.address import Address
from shared.collectives.several_hosts import MeetingPlace, StoreServer
from shared.errors import ConfigError, TandemError
from shared.kv.fleet_key import FleetKey
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import group_pb2

logger = logging.getLogger(__name__)

MOST_STRANGERS = 64
"""Connections whose side has not shown yet that it is a member."""
_FIELD = "group_leader"


class MeetingPort:
    """Serves on a thread of its own: a busy event loop must not silence it."""

    def __init__(self, bind: Address, shape: GroupShape, key: FleetKey | None, silence_s: float = SILENCE_S) -> None:
        """`bind`: an address of this host that the others reach. Raises ConfigError (`group_leader`) where that is not
        to be had."""
        self._shape = shape
        self._key = key
        self._silence_s = silence_s
        try:
            found = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0]
            host = str(found[4][0])
            self._socket = socket.create_server(
                (host, bind.port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=False
            )
            self._store = StoreServer(host)
        except OSError as error:
            raise ConfigError(f"{_FIELD}: cannot listen on {bind}: {error}", field=_FIELD, value=str(bind)) from error
        self.place = MeetingPlace(self._store.address, self._store.token, host)
        """Address, token and host at which the ranks of this host join."""
        self.lost_rank: int | None = None
        """The first rank that another host's member said is gone, or that is gone with it; None while all run."""
        self._members: dict[int, Frames[group_pb2.LeaderFrame, group_pb2.MemberFrame]] = {}
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._is_ending = False
        self._common: RankSpec

    @property
    def address(self) -> Address:
        """The address of the leader's port."""
        host, port = self._socket.getsockname()[:2]
        return Address(host, port)

    @property
    def present(self) -> Collection[int]:
        """Indices of the hosts whose members are connected."""
        return tuple(self._members)

    def open(self, common: RankSpec) -> None:
        """Admits members from now on, and sends them `common`, the part of the spec that all ranks share."""
        self._common = common
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self._thread.start()

    def close_store(self) -> None:
        """Closes the rendezvous store; all ranks are connected to each other. Idempotent."""
        self._store.close()

    def expect_ends(self) -> None:
        """The ranks are being stopped: from now on a rank that ends is not reported as lost."""
        self._is_ending = True

    def close(self) -> None:
        """Ends the ranks on the other hosts and waits a bounded time until they have exited. Idempotent."""
        self.expect_ends()
        self._store.close()
        if self._thread is None:
            self._socket.close()
            self._loop.close()
        elif self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket)
        self._server = server
        await self._closing.wait()
        server.close()
        for frames in self._members.values():
            frames.send(group_pb2.LeaderFrame(end=group_pb2.GroupEnd()))
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=2 * END_TIMEOUT_S)
        if self._members:
            logger.warning("hosts %s have not ended their ranks", ", ".join(map(str, self._members)))
        for writer in self._connections.values():
            writer.transport.abort()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) - len(self._keeping) >= MOST_STRANGERS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._welcome(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beat = group_pb2.LeaderFrame(beat=group_pb2.GroupBeat())
        frames = Frames(reader, writer, group_pb2.MemberFrame, beat, self._silence_s)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                index = await self._admit(frames)
            await self._keep(index, frames)
        except TandemError as refusal:
            logger.warning("a host was refused by this worker's group: %s", refusal)
            frames.send(group_pb2.LeaderFrame(refusal=to_proto(refusal)))
        except (BrokenConnection, TimeoutError) as error:
            logger.debug("a connection to this worker's group ended early: %s", error)
        finally:
            await frames.close()

    async def _keep(self, index: int, frames: Frames[group_pb2.LeaderFrame, group_pb2.MemberFrame]) -> None:
        logger.info("host %d of %d has joined the group", index, self._shape.num_hosts)
        task = asyncio.current_task()
        assert task is not None
        self._keeping.add(task)
        try:
            async for message in frames.messages():
                self._take(message)
        finally:
            del self._members[index]
            self._keeping.discard(task)
            if not self._is_ending:
                self._lose(self._common.ways.ranks_of(index)[0], f"host {index} has left, or is silent")

    async def _admit(self, frames: Frames[group_pb2.LeaderFrame, group_pb2.MemberFrame]) -> int:
        """Raises Unauthenticated, ConfigError, BrokenConnection."""
        hello = (await frames.receive()).hello
        nonce = secrets.token_bytes(NONCE_BYTES)
        own = group_pb2.LeaderHello(nonce=nonce, proof=prove(self._key, "leader", hello, nonce))
        frames.send(group_pb2.LeaderFrame(hello=own))
        shown = (await frames.receive()).proof.proof
        check_proof(self._key, "member", hello, nonce, shown)
        self._shape.check(hello, self._members)
        if self._is_ending or self.lost_rank is not None:
            raise BrokenConnection("the group ends")
        self._members[hello.host_index] = frames  # no wait between: an index is taken once
        frames.send(group_pb2.LeaderFrame(ranks=self._ranks()))
        return hello.host_index

    def _ranks(self) -> group_pb2.GroupRanks:
        common = self._common
        return group_pb2.GroupRanks(
            worker=common.name,
            tp=common.tensor,
            pp=common.pipeline,
            ep=common.expert,
            backend=common.backend,
            senders=common.senders,
            dtype=common.dtype,
            kernels=common.kernels,
            store=self.place.store,
            token=self.place.token,
            quantization=common.quantization,
            has_adapters=common.has_adapters,
        )

    def _take(self, message: Message) -> None:
        if isinstance(message, group_pb2.RankEnded) and not self._is_ending:
            self._lose(message.rank, f"rank {message.rank}: {message.how}")

    def _lose(self, rank: int, how: str) -> None:
        """Marks the group as broken and admits no member any more: a member that reconnects joins the next
        incarnation."""
        if self.lost_rank is None:
            logger.error("this worker's group has lost a rank on another host: %s", how)
            self._server.close()
            self.lost_rank = rank


def open_meeting(settings: WorkerSettings) -> MeetingPort:
    """The rendezvous that a worker's settings describe. Raises ConfigError."""
    leader = Address.parse(settings.group_leader, _FIELD, min_port=1)
    bind = replace(leader, host=settings.group_address or leader.host)
    shape = GroupShape(settings.group_hosts, settings.tp, settings.pp)
    return MeetingPort(bind, shape, FleetKey.of(settings.fleet_key.get_secret_value()))
