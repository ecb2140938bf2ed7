"""What Linux says of a machine is read as it means it; a machine that says nothing is no error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cores.topology import Cpu, Topology, format_cpu_list, parse_cpu_list, read_topology
from tests.unit.cores.machines import Machine, laptop, two_sockets


@given(st.sets(st.integers(0, 300)))
def test_lists_are_read_as_they_are_written(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


def test_lists_are_written_in_runs() -> None:
    assert format_cpu_list([3, 2, 0, 8, 9, 10]) == "0,2-3,8-10"
    assert parse_cpu_list("0, 2-3,3,8-9\n") == (0, 2, 3, 8, 9)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1.5", "0-3-5"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"CPU's number|ends before"):
        parse_cpu_list(text)


def test_the_threads_of_a_laptops_cores_and_their_kinds(tmp_path: Path) -> None:
    found = read_topology(laptop(tmp_path).root)
    assert [cpu.core for cpu in found.cpus] == [0, 0, 2, 2, 4, 4, 6, 6, *range(8, 16)]
    assert [cpu.is_fast for cpu in found.cpus] == [True] * 8 + [False] * 8
    assert {cpu.node for cpu in found.cpus} == {0}


def test_the_nodes_of_two_sockets_and_their_free_memory(tmp_path: Path) -> None:
    found = read_topology(two_sockets(tmp_path).root)
    assert [cpu.node for cpu in found.cpus] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [cpu.core for cpu in found.cpus] == [*range(8), *range(8)]
    assert all(cpu.is_fast for cpu in found.cpus)
    assert dict(found.free_bytes) == {0: 50_000_000 << 10, 1: 60_000_000 << 10, 2: 900_000_000 << 10}


def test_clocks_or_capacities_tell_slow_cores_where_there_is_no_list_of_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [[cpu] for cpu in range(4)])
    machine.clocks({0: 5_100_000, 1: 4_900_000, 2: 3_300_000, 3: 3_300_000})
    assert [cpu.is_fast for cpu in read_topology(tmp_path).cpus] == [True, True, False, False]
    for cpu, capacity in enumerate((446, 446, 1024, 1000)):
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert [cpu.is_fast for cpu in read_topology(tmp_path).cpus] == [False, False, True, True]


def test_a_machine_that_says_nothing_has_cores_of_one_kind(tmp_path: Path) -> None:
    silent = read_topology(tmp_path)
    assert silent == Topology(())
    assert silent.restricted({5, 2}) == (Cpu(2, 2), Cpu(5, 5))


def test_this_machine_describes_the_cpus_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert [cpu.number for cpu in read_topology().restricted(allowed)] == sorted(allowed)
