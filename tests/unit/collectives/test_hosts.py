"""Which host each rank of a group has, and what connects which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.collectives.rank_links import Ways
from shared.errors import ConfigError


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
