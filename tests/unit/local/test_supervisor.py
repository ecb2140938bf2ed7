"""Parts that die come back on their own addresses, or are given up, while the rest goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from services.local.supervisor import Change, Died, Restarted
from tests.unit.local.fakes import FakeCommands
from tests.unit.local.processes import wait_for_end

DEADLINE_S = 20.0


@pytest.fixture
def supervised(spec: ClusterSpec) -> ClusterSpec:
    return replace(spec, restart=True)


async def change(cluster: LocalCluster) -> Change:
    return await asyncio.wait_for(cluster.next_change(), DEADLINE_S)


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


async def test_the_index_comes_back_under_its_url(supervised: ClusterSpec, commands: FakeCommands) -> None:
    async with LocalCluster(supervised, commands=commands) as cluster:
        pid = cluster.index_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert [type(await change(cluster)) for _ in range(2)] == [Died, Restarted]
        assert cluster.index_pid not in (None, pid)
        assert commands.index_is_there()
    assert not commands.index_is_there()


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


async def test_a_start_that_fails_counts_as_a_death(supervised: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["prefill-0"] = "starts once"
    async with LocalCluster(supervised, commands=commands) as cluster:
        os.kill(cluster.children["prefill-0"].pid, signal.SIGKILL)
        deaths = [await change(cluster) for _ in range(3)]
        assert all(isinstance(death, Died) for death in deaths)
        assert [death.how for death in deaths if isinstance(death, Died)][1:] == ["the port is taken"] * 2
        assert isinstance(deaths[2], Died)
        assert deaths[2].again_in_s is None


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
