"""A rank that dies or stops in the middle of a sum ends the group everywhere, soon and by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared.collectives.cpu_group import CpuGroup, group_bytes, shared_memory
from shared.errors import RankLost
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

SIZE = 3
DEADLINE_S = 300.0


@pytest.fixture
def members() -> Iterator[list[subprocess.Popen[str]]]:
    """Three ranks that add up without end."""
    descriptor = shared_memory(group_bytes(load(choose()[1]), SIZE))
    module = "tests.unit.collectives.member"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(descriptor), str(rank), str(SIZE)],
            pass_fds=[descriptor],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    os.close(descriptor)
    for member in started:
        assert member.stdout is not None
        assert member.stdout.readline() == "running\n"
    yield started
    for member in started:
        member.kill()
        member.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_name_the_lost_rank(members: list[subprocess.Popen[str]], rank: int, how: signal.Signals) -> None:
    members[rank].send_signal(how)
    for other, member in enumerate(members):
        if other != rank:
            assert member.stdout is not None
            assert member.stdout.readline().split()[:2] == ["lost", str(rank)]


def test_an_idle_group_can_be_asked() -> None:
    """What a leader without work asks: there is no sum that could fail."""
    library = load(choose()[1])
    descriptor = shared_memory(group_bytes(library, 2))
    try:
        first, second = CpuGroup(library, descriptor, 0, 2), CpuGroup(library, descriptor, 1, 2)
        first.meet()
        assert first.lost_rank() is None
        second.fail(1)
        assert first.lost_rank() == 1
        first.close()
        first.close()
        second.close()
    finally:
        os.close(descriptor)


def test_a_meeting_ends_for_all_when_one_gives_up() -> None:
    """However long the others would wait for the one that is late."""
    library = load(choose()[1])
    descriptor = shared_memory(group_bytes(library, 3))
    first, second = (CpuGroup(library, descriptor, rank, 3) for rank in range(2))
    waits = ThreadPoolExecutor(1)
    try:
        waiting = waits.submit(first.meet, limit_s=1e6)
        with pytest.raises(RankLost) as late:
            second.meet(limit_s=0)
        assert late.value.details["rank"] == 2
        with pytest.raises(RankLost) as lost:
            waiting.result(timeout=DEADLINE_S)
        assert lost.value.details["rank"] == 1
    finally:
        CpuGroup(library, descriptor, 2, 3).close()  # ends a wait that nothing else does
        waits.shutdown()
        first.close()
        second.close()
        os.close(descriptor)


def test_a_rank_that_leaves_ends_the_others_waits_at_once_but_not_what_it_has_sent() -> None:
    """No death, and no silence of any length, is needed: here a silent rank would be waited for without end."""
    library = load(choose()[1])
    descriptor = shared_memory(group_bytes(library, 2))
    first, second = (CpuGroup(library, descriptor, rank, 2, stuck_s=1e6) for rank in range(2))
    waits = ThreadPoolExecutor(1)
    try:
        second.meet()
        first.broadcast(torch.ones(1024))
        first.close()
        got = torch.zeros(1024)
        second.broadcast(got)
        assert got.eq(1).all()
        assert second.lost_rank() == 0
        waiting = waits.submit(second.all_reduce, torch.zeros(1024))
        with pytest.raises(RankLost) as lost:
            waiting.result(timeout=DEADLINE_S)
        assert lost.value.details["rank"] == 0
        with pytest.raises(RankLost):
            second.broadcast(got)
    finally:
        second.fail(0)  # ends a wait that nothing else does
        waits.shutdown()
        second.close()
        os.close(descriptor)
