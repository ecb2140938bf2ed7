"""Workers that are groups over two hosts, each a tree of processes of its own: no memory in common, TCP alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.running import DEMO, Running, gone, running
from tests.e2e.streams import prompt, under_fault, undisturbed
from tests.e2e.test_experts import write_model
from tests.e2e.test_groups import FOLLOWER, incarnations
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

MAX_TOKENS = 80
"""Two processes start again, one behind the other, within the time that streams may take in all."""
ALONE = {"num_prefill": 0, "mode": "collocated"}


def ranks_below(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if FOLLOWER in child.cmdline()]


def host(cluster: Running, worker: str, number: int = 0) -> psutil.Process:
    """What stands for one host of a worker; the first is the worker."""
    name = f"{worker}-host-{number}" if number else worker
    return psutil.Process(cluster.pid(name))


def memories(process: psutil.Process) -> set[str]:
    """Memory by which it may reach others: writable shared mappings, by device and inode."""
    found = set()
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        _, permissions, _, device, inode, *_ = line.split()
        if permissions[1] == "w" and permissions.endswith("s"):
            found.add(f"{device} {inode}")
    return found


@pytest.mark.parametrize(
    ("family", "spec", "per_host"),
    [
        ("demo", {"pp": 2}, 1),
        pytest.param("demo", {**ALONE, "tp": 2, "pp": 2}, 2, marks=pytest.mark.slow),
        pytest.param("demo", {**ALONE, "tp": 2}, 1, marks=pytest.mark.slow),
        pytest.param("mixtral", {**ALONE, "tp": 2, "ep": 2}, 1, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", {**ALONE, "tp": 2}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_a_worker_over_two_hosts_gives_the_tokens_of_transformers(
    tmp_path: Path, family: str, spec: dict[str, Any], per_host: int
) -> None:
    model = DEMO if family == "demo" else write_model(tmp_path / "model", family)
    tokens = prompt(0) * 3 + prompt(1)[:20]
    expected = transformers_greedy(model, tokens)
    async with running(tmp_path / "run", model, group_hosts=2, **spec) as cluster:
        leader, member = host(cluster, "decode-0"), host(cluster, "decode-0", 1)
        assert (len(ranks_below(leader)), len(ranks_below(member))) == (per_host - 1, per_host)
        here = {memory for process in (leader, *ranks_below(leader)) for memory in memories(process)}
        there = {memory for process in (member, *ranks_below(member)) for memory in memories(process)}
        assert not here & there, "no memory in common"
        for _ in range(2):  # the second time behind its own prefix
            assert await cluster.tokens(tokens, max_tokens=64, ignore_eos=True) == expected
        await cluster.idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "spec"),
    [
        (victim, spec)
        for spec in ({"decode_tp": 2}, {"prefill_tp": 2, "pp": 2})
        for victim in ("rank", "member", "leader")
    ],
    ids=str,
)
async def test_the_death_of_any_process_of_a_group_over_hosts_costs_no_stream_a_token(
    tmp_path: Path, victim: str, spec: dict[str, int]
) -> None:
    async with running(tmp_path, group_hosts=2, num_kv_blocks=1600, restart=True, **spec) as cluster:
        expected = await undisturbed(cluster, MAX_TOKENS)
        before = incarnations(await cluster.status())
        leader, member = host(cluster, "decode-0"), host(cluster, "decode-0", 1)
        ranks = [*ranks_below(leader), *ranks_below(member)]
        killed = {"rank": ranks[-1], "member": member, "leader": leader}[victim]

        async def kill(_: object) -> None:
            os.kill(killed.pid, signal.SIGKILL)
            for process in (leader, *ranks):
                await gone(process.pid)

        await under_fault(cluster, kill, expected, MAX_TOKENS)
        after = incarnations(await cluster.until(lambda status: incarnations(status).keys() == before.keys()))
        assert {name for name in after if after[name] != before[name]} == {"decode-0"}
        assert member.is_running() == (victim != "member"), "it comes to the next incarnation by itself"
        await cluster.idle()
        assert await cluster.tokens(prompt(0), max_tokens=MAX_TOKENS, ignore_eos=True) == expected[0]
