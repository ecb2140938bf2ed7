"""A rank that is lost ends the others' waits, over memory and TCP."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed

from shared.collectives.cpu_group import CpuGroup, group_bytes, shared_memory
from shared.collectives.distributed import LOOPBACK, DistributedGroup
from shared.errors import RankLost
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
from tests.unit.collectives.in_threads import needs_library

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


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_name_the_lost_rank(members: list[subprocess.Popen[str]], rank: int, how: signal.Signals) -> None:
    members[rank].send_signal(how)
    for other, member in enumerate(members):
        if other != rank:
            assert member.stdout is not None
            assert member.stdout.readline().split()[:2] == ["lost", str(rank)]


@needs_library
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


@needs_library
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


@needs_library
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


@contextmanager
def groups(path: Path, limit_s: float = 600.0) -> Iterator[list[DistributedGroup]]:
    """All ranks of a group, in this process."""

    def join(rank: int) -> DistributedGroup:
        store = distributed.FileStore(str(path / "store"), SIZE)
        return DistributedGroup(rank, SIZE, store, limit_s=limit_s, address=LOOPBACK)

    with ThreadPoolExecutor(SIZE) as threads:
        joined = list(threads.map(join, range(SIZE)))
    yield joined
    for group in joined:
        group.close()


def waits_begun(group: DistributedGroup) -> threading.Event:
    """Set once a call of the group's has looked for a lost rank while it waited."""
    begun, check, looks = threading.Event(), group.check, itertools.count()

    def counted() -> None:
        if next(looks):  # the first look is before the call begins
            begun.set()
        check()

    group.check = counted  # type: ignore[method-assign]
    return begun


def test_a_rank_known_to_be_gone_ends_waits_for_silent_ones(tmp_path: Path) -> None:
    """Over TCP a silent rank is like one that computes; who watches the processes knows more."""
    with groups(tmp_path) as joined, ThreadPoolExecutor(2) as waits:
        x = torch.zeros(8)
        begun = [waits_begun(group) for group in joined[1:]]
        waiting: list[Future[None]] = [
            waits.submit(joined[1].all_reduce, x),
            waits.submit(joined[2].broadcast, x.clone()),
        ]
        for event in begun:
            assert event.wait(DEADLINE_S)
        for group in joined:
            group.fail(0)
        for wait in waiting:
            with pytest.raises(RankLost) as lost:
                wait.result(DEADLINE_S)
            assert lost.value.details["rank"] == 0
        for group in joined:
            with pytest.raises(RankLost):
                group.check()
            with pytest.raises(RankLost):
                group.gather(x)


def test_a_rank_that_stays_silent_is_waited_for_up_to_the_limit(tmp_path: Path) -> None:
    with groups(tmp_path, limit_s=0.5) as joined, pytest.raises(RankLost):
        joined[1].broadcast(torch.zeros(8))


def test_a_rank_that_has_left_calls_nobody(tmp_path: Path) -> None:
    with groups(tmp_path) as joined:
        joined[1].close()
        joined[1].close()
        with pytest.raises(RankLost):
            joined[1].all_reduce(torch.zeros(8))


@pytest.mark.slow
def test_the_death_of_a_rank_ends_the_others_waits(tmp_path: Path) -> None:
    """They have connections to it, which its kernel closes."""
    members = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.collectives.tcp_member", str(tmp_path / "store"), str(rank), str(SIZE)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "running\n"
        members[1].kill()
        for member in (members[0], members[2]):
            assert member.stdout is not None
            assert member.stdout.readline() == "lost\n"
    finally:
        for member in members:
            member.kill()
            member.communicate()
