"""The hosts of a group meet over real sockets: who is let in, and what becomes of either side without the other."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest
import uvloop

from services.local.places import reserved_address
from services.worker.group.meeting import join_check, leader_port, member
from services.worker.group.meeting.frames import MOST_BYTES, BrokenConnection, Frames
from services.worker.group.meeting.join_check import NONCE_BYTES, GroupShape
from services.worker.group.meeting.leader_port import MeetingPort
from services.worker.group.meeting.member import Member
from services.worker.group.rank_processes import RankProcess
from services.worker.settings import WorkerSettings
from shared.address import Address
from shared.config import load_settings
from shared.errors import ConfigError, RankLost, TandemError, Unauthenticated
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
from shared.kv.fleet_key import FleetKey
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import group_pb2
from tests.integration.worker.meeting_leader import COMMON
from tests.unit.collectives.in_threads import needs_library
from tests.unit.local.processes import wait_for_end
from tests.waiting import DEADLINE_S, until

pytestmark = needs_library

KEY = "a secret of this fleet"
SHAPE = GroupShape(2, 2, 1)


@pytest.fixture(autouse=True)
def _idle_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RankProcess", partial(RankProcess, module="tests.integration.worker.idle_rank"))


@contextmanager
def leading(key: str = "", shape: GroupShape = SHAPE, silence_s: float = 15.0) -> Iterator[MeetingPort]:
    port = MeetingPort(Address("127.0.0.1", 0), shape, FleetKey.of(key), silence_s)
    port.open(COMMON)
    try:
        yield port
    finally:
        port.close()
        port.close()


def settings_of(address: Address, key: str = "") -> WorkerSettings:
    given = ["--name=w-1", "--model=models/demo", "--tp=2", "--group-hosts=2", f"--group-leader={address}"]
    secret = [f"--fleet-key={key}"] if key else []
    return load_settings(WorkerSettings, [*given, "--group-host-index=1", *secret])


@asynccontextmanager
async def joined(address: Address, key: str = "", silence_s: float = 15.0) -> AsyncIterator[Member]:
    """A member that the leader has let in."""
    found = Member(settings_of(address, key=key), load(choose()[1]), silence_s)
    await found.start()
    await asyncio.sleep(0)  # its task runs: it ends the ranks
    try:
        yield found
    finally:
        assert found._task is not None
        found._task.cancel()  # else it waits for its leader to end the group
        await asyncio.wait({found._task})
        await found.close()


def pid_of(found: Member) -> int:
    (rank,) = found._ranks
    assert rank.rank == 1
    return rank._process.pid


async def ended(pid: int) -> bool:
    return await asyncio.to_thread(wait_for_end, pid, DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", KEY])
async def test_a_member_starts_its_ranks_and_ends_them_when_the_leader_does(key: str) -> None:
    with leading(key) as port:
        async with joined(port.address, key) as found:
            pid = pid_of(found)
            assert tuple(port.present) == (1,)
            await asyncio.to_thread(port.close)
            assert port.lost_rank is None
            assert not port.present
            assert await ended(pid)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_leader_is_told_of_a_rank_that_dies_or_is_stopped(number: signal.Signals) -> None:
    with leading() as port:
        async with joined(port.address) as found:
            os.kill(pid_of(found), number)
            await until(lambda: port.lost_rank == 1)
            with pytest.raises(OSError):  # noqa: PT011 - nobody comes to a group that ends
                await asyncio.open_connection(port.address.host, port.address.port)


async def test_a_rank_that_ends_as_it_is_told_is_not_lost() -> None:
    with leading() as port:
        async with connected(port.address) as frames:
            assert (await shake_hands(frames, hello())).HasField("ranks")
            port.expect_ends()
            frames.send(group_pb2.MemberFrame(rank_ended=group_pb2.RankEnded(rank=1, how="exit status 0")))
        await until(lambda: not port.present)
        assert port.lost_rank is None


@contextmanager
def leader_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "tests.integration.worker.meeting_leader", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_a_member_ends_its_ranks_with_its_leader_and_comes_to_the_next_one() -> None:
    with reserved_address() as at, leader_process(Address.parse(at, "at").port) as (first, port):
        async with joined(Address("127.0.0.1", port)) as found:
            pid = pid_of(found)
            first.kill()
            assert await ended(pid)
            with leader_process(port):
                await until(lambda: bool(found._ranks))
                assert pid_of(found) != pid


@pytest.mark.slow
async def test_a_silent_leader_is_lost() -> None:
    with leader_process() as (process, port):
        async with joined(Address("127.0.0.1", port), silence_s=1.0) as found:
            pid = pid_of(found)
            process.send_signal(signal.SIGSTOP)
            assert await ended(pid)


@pytest.mark.slow
async def test_a_silent_member_is_lost() -> None:
    with leading(silence_s=1.0) as port:
        async with connected(port.address) as frames:
            assert (await shake_hands(frames, hello())).HasField("ranks")
            await until(lambda: port.lost_rank == 1)


Raw = Frames[group_pb2.MemberFrame, group_pb2.LeaderFrame]


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    frames: Raw = Frames(reader, writer, group_pb2.LeaderFrame, group_pb2.MemberFrame())
    try:
        yield frames
    finally:
        await frames.close()


def hello(**fields: object) -> group_pb2.MemberHello:
    known = {"build": join_check.own_build(), "num_hosts": 2, "host_index": 1, "tp": 2, "pp": 1}
    return group_pb2.MemberHello(**{**known, "nonce": bytes(NONCE_BYTES), **fields})  # type: ignore[arg-type]


async def shake_hands(frames: Raw, said: group_pb2.MemberHello, proof: bytes | None = None) -> group_pb2.LeaderFrame:
    """What the leader answers to the proof, by default that of a fleet without a key."""
    frames.send(group_pb2.MemberFrame(hello=said))
    await frames.receive()
    frames.send(group_pb2.MemberFrame(proof=group_pb2.GroupProof(proof=proof or b"")))
    return await frames.receive()


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"num_hosts": 4}, "group_hosts", ("4", "2")),
        ({"host_index": 2}, "group_host_index", ("2", "1 to 1")),
        ({"host_index": 0}, "group_host_index", ("0", "1 to 1")),
        ({"build": "tandem 0"}, "build", ("tandem 0", join_check.own_build())),
        ({"tp": 1, "pp": 2}, "tp", ("1", "2")),
        ({"nonce": b""}, "fleet_key", ("0 bytes", "32")),
    ],
    ids=str,
)
async def test_who_is_not_of_the_group_is_refused_with_both_values(
    fields: dict[str, object], field: str, words: tuple[str, ...]
) -> None:
    with leading() as port:
        async with connected(port.address) as frames:
            refusal = from_proto((await shake_hands(frames, hello(**fields))).refusal)
            assert refusal.field == field
            assert all(word in refusal.message for word in words)
            with pytest.raises(BrokenConnection):
                await frames.receive()
        assert (port.lost_rank, tuple(port.present)) == (None, ())


@pytest.mark.slow
async def test_a_second_host_of_one_index_is_refused_and_the_first_one_stays() -> None:
    with leading() as port:
        async with joined(port.address) as first:
            second = Member(settings_of(port.address), load(choose()[1]))
            with pytest.raises(ConfigError, match="group_host_index 1 is taken"):
                await second.start()
            assert not second._ranks
            assert first._is_joined
            assert port.lost_rank is None


@pytest.mark.parametrize(("leaders", "members"), [(KEY, "another one, as long"), (KEY, ""), ("", KEY)])
async def test_both_sides_must_know_the_fleets_key(leaders: str, members: str) -> None:
    with leading(leaders) as port:
        stranger = Member(settings_of(port.address, key=members), load(choose()[1]))
        with pytest.raises(Unauthenticated, match="fleet_key"):
            await stranger.start()
        assert not stranger._ranks
        assert (port.lost_rank, tuple(port.present)) == (None, ())


@pytest.mark.parametrize("shown", ["", "replayed", "the leader's own"])
async def test_a_member_that_shows_no_proof_or_anothers_learns_nothing_of_the_ranks(shown: str) -> None:
    with leading(KEY) as port:
        key = FleetKey(KEY.encode())
        said = hello()
        before = join_check.prove(key, "member", said, bytes(NONCE_BYTES))
        async with connected(port.address) as frames:
            frames.send(group_pb2.MemberFrame(hello=said))
            theirs = (await frames.receive()).hello
            proof = {"": b"", "replayed": before, "the leader's own": theirs.proof}[shown]
            frames.send(group_pb2.MemberFrame(proof=group_pb2.GroupProof(proof=proof)))
            answer = await frames.receive()
            assert isinstance(from_proto(answer.refusal), Unauthenticated)
            assert not answer.HasField("ranks")
        assert not port.present


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", (MOST_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\3abc"])
async def test_what_is_no_frame_ends_its_connection_alone(sent: bytes) -> None:
    with leading() as port:
        reader, writer = await asyncio.open_connection(port.address.host, port.address.port)
        writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()
        async with joined(port.address):
            assert port.lost_rank is None


def test_what_is_sent_behind_the_end_of_a_connection_is_dropped() -> None:
    async def send(address: Address) -> None:
        async with connected(address) as frames:
            assert (await shake_hands(frames, hello())).HasField("ranks")
            await frames.close()
            await asyncio.sleep(0)
            frames.send(group_pb2.MemberFrame(beat=group_pb2.GroupBeat()))

    # As in the services' processes: there the transport raises.
    with leading() as port, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send(port.address))


async def test_a_member_that_cannot_start_its_ranks_says_so_and_does_not_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: object) -> RankProcess:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(member, "RankProcess", full)
    with leading() as port:
        with pytest.raises(RankLost, match=r"cannot start its ranks: .*temporarily unavailable"):
            await Member(settings_of(port.address), load(choose()[1])).start()
        await until(lambda: port.lost_rank == 1)


async def test_strangers_take_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_port, "MOST_STRANGERS", 2)
    with leading() as port:
        async with connected(port.address) as first, connected(port.address) as second:
            for frames in (first, second):  # both are taken in
                frames.send(group_pb2.MemberFrame(hello=hello()))
                assert (await frames.receive()).HasField("hello")
            async with connected(port.address) as third:
                with pytest.raises(BrokenConnection):
                    await third.receive()
        async with joined(port.address):
            assert tuple(port.present) == (1,)


def test_a_taken_port_is_refused_with_its_setting() -> None:
    with leading() as port, pytest.raises(TandemError) as refused:
        MeetingPort(port.address, SHAPE, None)
    assert refused.value.field == "group_leader"
