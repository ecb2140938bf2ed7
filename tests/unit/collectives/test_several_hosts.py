"""Groups over several hosts: who is connected by what."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.collectives import several_hosts
from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.cpu_group import CpuGroup
from shared.collectives.distributed import DistributedGroup
from shared.collectives.rank_links import RankLinks, Ways
from shared.collectives.several_hosts import MeetingPlace, StoreServer, host_memories, join
from shared.errors import ConfigError, RankLost
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
from tests.unit.collectives.in_threads import needs_library


@st.composite
def over_hosts(draw: st.DrawFn) -> Ways:
    tensor, pipeline = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    hosts = draw(st.sampled_from([n for n in range(1, tensor * pipeline + 1) if tensor * pipeline % n == 0]))
    backend = draw(st.sampled_from(["shm", "gloo"]))
    return Ways(tensor, pipeline, backend, senders=tuple(range(tensor * pipeline)), hosts=hosts)  # type: ignore[arg-type]


@given(over_hosts())
def test_hosts_cover_each_rank_once_in_order(ways: Ways) -> None:
    held = [list(ways.ranks_of(host)) for host in range(ways.hosts)]
    assert [rank for ranks in held for rank in ranks] == list(range(ways.num_ranks))
    assert len({len(ranks) for ranks in held}) == 1
    assert all(ways.host_of(rank) == host for host, ranks in enumerate(held) for rank in ranks)


@given(over_hosts())
def test_memory_connects_ranks_of_one_host_alone(ways: Ways) -> None:
    for group in ways.memberships:
        hosts = {ways.host_of(rank) for rank in group.ranks}
        assert group.backend == "gloo" or len(hosts) == 1, group
        if ways.backend == "shm":
            assert (group.backend == "shm") == (len(hosts) == 1), group


@given(over_hosts())
def test_hosts_change_what_connects_a_group_not_who_is_in_it(ways: Ways) -> None:
    if ways.backend == "shm":
        alone = Ways(ways.tensor, ways.pipeline, senders=ways.senders)
        assert [group[:2] for group in ways.memberships] == [group[:2] for group in alone.memberships]


def test_hosts_that_do_not_divide_the_ranks_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="group_hosts is 4, which does not divide 6 ranks"):
        Ways(3, 2, hosts=4)


DEADLINE_S = 300.0
WAYS = Ways(2, 2, senders=(0, 1, 2, 3), hosts=2)


@contextmanager
def joined(ways: Ways = WAYS) -> Iterator[list[RankLinks]]:
    """All ranks' links."""
    library, store = load(choose()[1]), StoreServer("127.0.0.1")
    memories = [host_memories(library, ways, host) for host in range(ways.hosts)]
    place = MeetingPlace(store.address, store.token, "127.0.0.1")

    def join_as(rank: int) -> RankLinks:
        return join(library, memories[ways.host_of(rank)], rank, ways, place)

    with ThreadPoolExecutor(ways.num_ranks) as threads:
        links = list(threads.map(join_as, range(ways.num_ranks)))
    for descriptor in (descriptor for of_host in memories for descriptor in of_host):
        os.close(descriptor)
    store.close()
    try:
        yield links
    finally:
        for each in links:
            each.close()


@needs_library
def test_a_stage_on_one_host_has_its_memory_and_all_else_tcp() -> None:
    with joined() as links, ThreadPoolExecutor(WAYS.num_ranks) as threads:
        for each in links:
            assert isinstance(each.stage, CpuGroup)
            assert isinstance(each.everyone, DistributedGroup)
            assert isinstance(each.ahead or each.behind, DistributedGroup)
        sums: Callable[[RankLinks], list[float]] = lambda each: _sum_of_stage(each).tolist()  # noqa: E731
        assert list(threads.map(sums, links)) == [[1.0], [1.0], [5.0], [5.0]]


def _sum_of_stage(links: RankLinks) -> torch.Tensor:
    x = torch.tensor([float(links.everyone.rank)])
    assert links.stage is not None
    links.stage.all_reduce(x)
    return x


@needs_library
def test_followers_wait_for_plans_longer_than_for_anything_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be idle for hours."""
    monkeypatch.setattr(several_hosts, "LIMIT_S", 0.5)
    with joined() as links, ThreadPoolExecutor(WAYS.num_ranks) as threads:
        idle: list[Future[bytes]] = [threads.submit(broadcast_bytes, each.everyone) for each in links[1:]]
        behind = links[3].behind
        assert behind is not None
        with pytest.raises(RankLost):
            behind.broadcast(torch.zeros(4))
        assert not any(wait.done() for wait in idle)
        broadcast_bytes(links[0].everyone, b"a plan")
        assert [wait.result(DEADLINE_S) for wait in idle] == [b"a plan"] * 3


@needs_library
def test_a_rank_that_will_not_come_ends_the_meeting() -> None:
    """The first rank asks those who watch the processes; no store and no torch has a word in it."""
    library, store = load(choose()[1]), StoreServer("127.0.0.1")
    memories = host_memories(library, WAYS, 0)

    def gone() -> None:
        raise RankLost("rank 3 ended as it started", rank=3)

    with pytest.raises(RankLost, match="rank 3 ended as it started"):
        join(library, memories, 0, WAYS, MeetingPlace(store.address, store.token, "127.0.0.1"), gone)
    for descriptor in memories:
        os.close(descriptor)
    store.close()


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_store_that_is_gone_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Its process ends: torch would try for as long as ranks may take to start."""
    monkeypatch.setattr(several_hosts, "CONNECT_S", 0.5)
    library, store = load(choose()[1]), StoreServer("127.0.0.1")
    store.close()
    place = MeetingPlace(store.address, store.token, "127.0.0.1")
    memories = host_memories(library, WAYS, WAYS.host_of(rank))
    with ThreadPoolExecutor(1) as waits:
        try:
            with pytest.raises(RankLost, match=f"rank {rank} does not reach its group's store"):
                waits.submit(join, library, memories, rank, WAYS, place).result(DEADLINE_S)
        finally:
            for descriptor in memories:
                os.close(descriptor)
