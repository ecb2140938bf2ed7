"""What becomes of waits over torch's groups when a rank dies, is silent, or is known to be gone."""

from __future__ import annotations

import itertools
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

from shared.collectives.distributed import LOOPBACK, DistributedGroup
from shared.errors import RankLost

DEADLINE_S = 300.0
SIZE = 3


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
