"""Parts of a local cluster that die or hang come back, at a bounded pace."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.local import supervisor as supervisor_module
from services.local.cluster import LocalCluster
from services.local.parts import IndexPart
from services.local.spec import ClusterSpec
from services.local.supervisor import FIRST_DELAY_S, JITTER, WINDOW_S, Change, Died, Restarted, Restarts, Supervisor
from tests.unit.local.fakes import FakeCommands
from tests.unit.local.processes import wait_for_end

DEADLINE_S = 300.0


@pytest.fixture
def supervised(spec: ClusterSpec) -> ClusterSpec:
    return spec.replace(restart=True)


async def change(cluster: LocalCluster) -> Change:
    return await asyncio.wait_for(cluster.next_change(), DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvstore", "prefill-0", "decode-0", "router"])
async def test_a_service_comes_back_with_its_command_and_its_log(
    supervised: ClusterSpec, commands: FakeCommands, name: str
) -> None:
    async with LocalCluster(supervised, commands=commands) as cluster:
        before = cluster.children[name]
        before.log_path.write_text("of its first life\n")
        os.kill(before.pid, signal.SIGKILL)
        died, back = await change(cluster), await change(cluster)
        assert isinstance(died, Died)
        assert (died.name, died.how) == (name, "SIGKILL")
        assert isinstance(back, Restarted)
        assert back.name == name
        after = cluster.children[name]
        assert after.pid != before.pid
        assert after.returncode is None
        assert before.log_path.read_text().startswith("of its first life\n")
        others = [child for other, child in cluster.children.items() if other != name]
        assert all(child.returncode is None for child in others)


@pytest.mark.slow
async def test_the_index_comes_back_under_its_url(supervised: ClusterSpec, commands: FakeCommands) -> None:
    async with LocalCluster(supervised, commands=commands) as cluster:
        pid = cluster.index_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert [type(await change(cluster)) for _ in range(2)] == [Died, Restarted]
        assert cluster.index_pid not in (None, pid)
        assert commands.index_is_there()
    assert not commands.index_is_there()


@pytest.mark.slow
async def test_the_third_death_in_a_minute_is_reported_and_the_rest_serves(
    supervised: ClusterSpec, commands: FakeCommands
) -> None:
    async with LocalCluster(supervised, commands=commands) as cluster:
        for _ in range(2):
            os.kill(cluster.children["decode-0"].pid, signal.SIGKILL)
            assert [type(await change(cluster)) for _ in range(2)] == [Died, Restarted]
        os.kill(cluster.children["decode-0"].pid, signal.SIGKILL)
        last = await change(cluster)
        assert isinstance(last, Died)
        assert last.again_in_s is None
        assert "not started again" in str(last)
        assert cluster.children["decode-0"].returncode is not None
        assert cluster.children["router"].returncode is None
        logged = (supervised.log_dir / "supervisor.log").read_text()
        assert logged.count("decode-0 is back") == 2
        assert logged.count("decode-0 ended") == 3


@pytest.mark.slow
async def test_a_start_that_fails_counts_as_a_death(supervised: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["prefill-0"] = "starts once"
    async with LocalCluster(supervised, commands=commands) as cluster:
        os.kill(cluster.children["prefill-0"].pid, signal.SIGKILL)
        deaths = [await change(cluster) for _ in range(3)]
        assert all(isinstance(death, Died) for death in deaths)
        assert [death.how for death in deaths if isinstance(death, Died)][1:] == ["the port is taken"] * 2
        assert isinstance(deaths[2], Died)
        assert deaths[2].again_in_s is None


async def test_a_death_is_reported_where_the_logs_are_gone(spec: ClusterSpec, commands: FakeCommands) -> None:
    async with LocalCluster(spec, commands=commands) as cluster:
        shutil.rmtree(spec.state_dir)
        os.kill(cluster.children["decode-0"].pid, signal.SIGKILL)
        died = await change(cluster)
        assert isinstance(died, Died)
        assert (died.name, died.how) == ("decode-0", "SIGKILL")


@pytest.mark.slow
async def test_a_start_without_a_place_for_its_log_counts_as_a_death(
    supervised: ClusterSpec, commands: FakeCommands
) -> None:
    async with LocalCluster(supervised, commands=commands) as cluster:
        shutil.rmtree(supervised.state_dir)
        supervised.state_dir.write_text("")
        os.kill(cluster.children["decode-0"].pid, signal.SIGKILL)
        deaths = [await change(cluster) for _ in range(3)]
        assert ["Not a directory" in str(death) for death in deaths] == [False, True, True]
        assert isinstance(deaths[2], Died)
        assert deaths[2].again_in_s is None


@pytest.mark.slow
async def test_a_stop_while_a_part_starts_again_leaves_no_process(
    supervised: ClusterSpec, commands: FakeCommands
) -> None:
    cluster = LocalCluster(supervised, commands=commands)
    await cluster.start()
    commands.behaviours["decode-0"] = "never ready"
    first = cluster.children["decode-0"]
    os.kill(first.pid, signal.SIGKILL)
    assert isinstance(await change(cluster), Died)
    while (second := cluster.children["decode-0"]) is first or not second.pid:
        await asyncio.sleep(0.01)
    await cluster.stop()
    assert all(wait_for_end(child.pid) for child in cluster.children.values())
    assert commands.events()[-1] == "kvstore stop"


class Hanging:
    """A part that answers a few probes and then no more."""

    name = "decode-0"
    log_path = Path("decode-0.log")

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self._killed = asyncio.Event()
        self.num_starts = 0
        self.num_probes = 0

    async def restart(self) -> None:
        self._killed.clear()
        self._num_answers = 1_000_000
        self.num_starts += 1

    async def ended(self) -> str:
        await self._killed.wait()
        return "SIGKILL"

    async def answers(self) -> bool:
        self.num_probes += 1
        self._num_answers -= 1
        return self._num_answers >= 0

    def kill(self) -> None:
        self._killed.set()


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "PROBE_INTERVAL_S", 0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
async def test_a_part_that_no_longer_answers_is_killed_and_started_again() -> None:
    changes: asyncio.Queue[Change] = asyncio.Queue()
    part = Hanging(num_answers=2)
    supervisor = Supervisor(changes.put_nowait, restart=True, hang_timeout_s=0.1)
    supervisor.start([part])
    died = await asyncio.wait_for(changes.get(), DEADLINE_S)
    assert isinstance(died, Died)
    assert died.how == "SIGKILL after 0.1 s without an answer"
    assert isinstance(await asyncio.wait_for(changes.get(), DEADLINE_S), Restarted)
    assert part.num_starts == 1
    await supervisor.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
@pytest.mark.parametrize(("num_answers", "restart"), [(0, True), (2, False)])
async def test_what_never_answered_or_is_only_watched_is_left_alone(num_answers: int, restart: bool) -> None:
    part = Hanging(num_answers)
    supervisor = Supervisor(lambda change: pytest.fail(str(change)), restart=restart, hang_timeout_s=0.05)
    supervisor.start([part])
    await asyncio.sleep(0.3)
    assert part.num_starts == 0
    assert (part.num_probes > 0) == restart
    await supervisor.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
async def test_a_launcher_that_was_stopped_itself_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock has moved on by more than the time-out between two rounds, and every second probe is lost by it."""
    now, rounds, enough = [0.0], itertools.count(), asyncio.Event()
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Interrupted(Hanging):
        async def answers(self) -> bool:
            now[0] += 60.0
            if (number := next(rounds)) == 10:
                enough.set()
            return number % 2 == 0

    part = Interrupted(0)
    changes: list[Change] = []
    supervisor = Supervisor(changes.append, restart=True, hang_timeout_s=30.0)
    supervisor.start([part])
    await asyncio.wait_for(enough.wait(), DEADLINE_S)
    assert (changes, part.num_starts) == ([], 0)
    await supervisor.close()


@pytest.mark.slow
async def test_an_index_that_is_stopped_does_not_answer(spec: ClusterSpec, commands: FakeCommands) -> None:
    async with LocalCluster(spec, commands=commands) as cluster:
        part = IndexPart(cluster._index)  # type: ignore[arg-type]
        assert await part.answers()
        pid = cluster.index_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert not await part.answers()
        part.kill()
        assert await part.ended() == "SIGKILL"
        assert not await part.answers()


def test_three_deaths_in_a_minute_are_the_end() -> None:
    restarts = Restarts(lambda: 0.0)
    assert restarts.on_death(0.0) == FIRST_DELAY_S
    assert restarts.on_death(10.0) == 2 * FIRST_DELAY_S
    assert restarts.on_death(WINDOW_S - 0.1) is None


def test_deaths_that_lie_apart_cost_the_first_pause_each_time() -> None:
    restarts = Restarts(lambda: 0.0)
    assert [restarts.on_death(number * WINDOW_S) for number in range(10)] == [FIRST_DELAY_S] * 10


@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999])
def test_parts_that_die_together_do_not_start_together(drawn: float) -> None:
    assert Restarts(lambda: drawn).on_death(0.0) == FIRST_DELAY_S * (1 + JITTER * drawn)
