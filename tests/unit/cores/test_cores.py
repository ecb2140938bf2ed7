"""Cores: what the machine has, what a quota leaves, and who gets which."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cores.core_choice import CoreShare, count_threads, divide_share, share_cores, share_machine
from shared.cores.quota import read_quota
from shared.cores.topology import Cpu, Topology, format_cpu_list, parse_cpu_list, read_topology
from tests.unit.cores.machines import Machine, laptop, two_sockets

ALL = range(16)


def test_a_laptops_performance_cores_compute_alone(tmp_path: Path) -> None:
    topology = read_topology(laptop(tmp_path).root)
    assert share_machine(topology, ALL, None, 2) == [CoreShare((0, 1, 2, 3), 2), CoreShare((4, 5, 6, 7), 2)]
    assert share_machine(topology, ALL, None, 1) == [CoreShare(tuple(range(8)), 4)]


def test_slow_cores_help_where_fast_ones_are_few_or_not_allowed(tmp_path: Path) -> None:
    topology = read_topology(laptop(tmp_path).root)
    assert share_machine(topology, range(8, 16), None, 1) == [CoreShare(tuple(range(8, 16)), 8)]
    assert share_machine(topology, [0, 1, 2, 9], None, 1) == [CoreShare((0, 1, 2, 9), 3)]


def test_workers_are_dealt_to_nodes_the_one_with_more_free_memory_first(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path).root)
    node0, node1 = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    assert share_machine(topology, ALL, None, 1) == [CoreShare(node1, 4, 1)]
    assert share_machine(topology, ALL, None, 2) == [CoreShare(node1, 4, 1), CoreShare(node0, 4, 0)]
    assert share_machine(topology, ALL, None, 4) == [
        CoreShare((4, 5, 12, 13), 2, 1),
        CoreShare((0, 1, 8, 9), 2, 0),
        CoreShare((6, 7, 14, 15), 2, 1),
        CoreShare((2, 3, 10, 11), 2, 0),
    ]


def test_a_node_of_which_little_is_allowed_gets_no_worker_before_the_other_is_fuller(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path).root)
    allowed = (0, 1, 2, 3, 4)
    assert share_machine(topology, allowed, None, 2) == [CoreShare((0, 1), 2, 0), CoreShare((2, 3), 2, 0)]


def test_a_quota_bounds_threads_and_pins_to_no_single_core(tmp_path: Path) -> None:
    one_node = Topology(tuple(Cpu(number, number) for number in range(8)))
    assert share_machine(one_node, range(8), 2.5, 1) == [CoreShare((), 2)]
    assert share_machine(one_node, range(8), 5.0, 2) == [CoreShare((), 3), CoreShare((), 2)]
    assert share_machine(one_node, range(8), 0.5, 3) == [CoreShare((), 1)] * 3
    assert share_machine(one_node, range(8), 8.0, 1) == [CoreShare(tuple(range(8)), 8)]
    two_nodes = read_topology(two_sockets(tmp_path).root)
    assert share_machine(two_nodes, ALL, 3.0, 2) == [
        CoreShare((4, 5, 6, 7, 12, 13, 14, 15), 2, 1),
        CoreShare((0, 1, 2, 3, 8, 9, 10, 11), 1, 0),
    ]
    assert share_machine(two_nodes, ALL, 7.0, 1) == [CoreShare((4, 5, 6, 7, 12, 13, 14, 15), 4, 1)]


def test_threads_for_named_cpus_count_cores_within_the_quota(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path).root)
    assert count_threads(topology, (0, 8, 1), None) == 2
    assert count_threads(topology, ALL, 3.9) == 3
    assert count_threads(topology, ALL, 0.2) == 1


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Nodes of different sizes, with cores of one or two threads of which some are slow."""
    cpus: list[Cpu] = []
    for node in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 6))):
            core, is_fast = len(cpus), draw(st.booleans())
            cpus += [Cpu(core + i, core, node, is_fast) for i in range(draw(st.integers(1, 2)))]
    return Topology(tuple(cpus), {})


@pytest.mark.parametrize("quota", [None, 1.0, 3.5])
@given(topology=machines(), num_workers=st.integers(1, 10), data=st.data())
def test_no_share_leaves_its_bounds(
    quota: float | None, topology: Topology, num_workers: int, data: st.DataObject
) -> None:
    numbers = [cpu.number for cpu in topology.cpus]
    allowed = data.draw(st.sets(st.sampled_from(numbers), min_size=1))
    shares = share_machine(topology, allowed, quota, num_workers)
    assert len(shares) == num_workers
    by_number = {cpu.number: cpu for cpu in topology.cpus}
    for share in shares:
        assert share.num_threads >= 1
        assert allowed.issuperset(share.cpus)
        assert len({by_number[cpu].node for cpu in share.cpus}) <= 1
        if share.cpus:
            assert share.num_threads <= len({by_number[cpu].core for cpu in share.cpus})
    if quota is not None:
        assert sum(share.num_threads for share in shares) <= max(quota, num_workers, 1)
    elif num_workers == 1:
        assert shares[0].cpus


def test_threads_that_were_chosen_are_shared_out(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path).root)
    few = divide_share(topology, CoreShare(tuple(range(16)), 4), 2)
    assert [part.num_threads for part in few] == [2, 2]
    many = divide_share(topology, CoreShare(tuple(range(16)), 16), 4)
    assert [part.num_threads for part in many] == [4, 4, 4, 4]


@given(st.data())
def test_parts_are_disjoint_whole_cores_within_a_node_wherever_ranks_are_no_fewer_than_nodes(
    data: st.DataObject,
) -> None:
    num_nodes, per_core = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    cores = data.draw(st.integers(num_nodes, 24))
    nodes = [data.draw(st.integers(0, num_nodes - 1)) for _ in range(cores)]
    topology = Topology(
        tuple(Cpu(core + thread * cores, core, nodes[core]) for thread in range(per_core) for core in range(cores))
    )
    cpus = data.draw(st.sets(st.integers(0, cores * per_core - 1), min_size=1))
    share = CoreShare(tuple(sorted(cpus)), count_threads(topology, cpus, None))
    num_parts = data.draw(st.integers(1, 8))
    parts = divide_share(topology, share, num_parts)
    assert len(parts) == num_parts
    used = [cpu for part in parts for cpu in part.cpus]
    if not used:
        assert share.num_threads < num_parts
        return
    by_number = {cpu.number: cpu for cpu in topology.cpus}
    assert len(used) == len(set(used))
    assert set(used) <= cpus
    owners: dict[int, set[int]] = {}
    for rank, part in enumerate(parts):
        assert part.cpus
        assert 1 <= part.num_threads <= len(part.cpus)
        for cpu in part.cpus:
            owners.setdefault(by_number[cpu].core, set()).add(rank)
        if num_parts >= len({by_number[cpu].node for cpu in cpus}):
            assert len({by_number[cpu].node for cpu in part.cpus}) == 1
    assert all(len(ranks) == 1 for ranks in owners.values())


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "250000 100000")
    assert read_quota(tmp_path) == 2.5


def test_the_least_of_a_pod_and_its_container_holds(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/kubepods/pod1/c1")
    write(tmp_path, "sys/fs/cgroup/kubepods/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/cpu.max", "150000 50000")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/c1/cpu.max", "800000 100000")
    assert read_quota(tmp_path) == 3.0


@pytest.mark.parametrize("path", ["/", "/docker/abc", "/process/1"])
def test_version_1_has_files_of_its_own(tmp_path: Path, path: str) -> None:
    write(tmp_path, "proc/self/cgroup", f"12:cpuset:/\n4:cpu,cpuacct:{path}\n0::/")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "400000")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    write(tmp_path, "sys/fs/cgroup/cpuset/cpu.cfs_quota_us", "1")
    assert read_quota(tmp_path) == 4.0


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert read_quota(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "2:cpu:/\n0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert read_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/cpu.max", "nonsense")
    assert read_quota(tmp_path) is None


core_sets = st.lists(st.integers(0, 255), min_size=1, max_size=64, unique=True).map(sorted)


@given(cores=core_sets, data=st.data())
def test_enough_cores_are_split_into_runs_that_cover_them_in_order(cores: list[int], data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, len(cores)))
    runs = share_cores(cores, num_workers)
    assert [core for run in runs for core in run] == cores
    lengths = [len(run) for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] >= 1
    assert lengths[0] - lengths[-1] <= 1


@given(cores=core_sets, extra=st.integers(1, 200))
def test_too_few_cores_are_shared_evenly_one_to_each_worker(cores: list[int], extra: int) -> None:
    runs = share_cores(cores, len(cores) + extra)
    assert len(runs) == len(cores) + extra
    assert all(len(run) == 1 for run in runs)
    load = Counter(run[0] for run in runs)
    assert set(load) == set(cores)
    assert max(load.values()) - min(load.values()) <= 1
    assert [run[0] for run in runs] == sorted(run[0] for run in runs)


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
