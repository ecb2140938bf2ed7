"""Which cores compute for each worker of a machine, and with how many threads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shared.cores.topology import Cpu, Topology

FEWEST_FAST = 4
"""From this number on, a hybrid processor's fast cores compute alone: a thread on a slow core delays each loop.
With fewer of them the slow ones help."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One worker's part of the machine."""

    cpus: tuple[int, ...]
    """CPUs that it is pinned to, in order; empty = not pinned."""
    num_threads: int
    """Compute threads: one for each core, whatever its number of hardware threads."""
    node: int | None = None
    """The NUMA node that it keeps to, where the machine has several."""


def share_machine(
    topology: Topology, allowed: Collection[int], quota: float | None, num_workers: int
) -> list[CoreShare]:
    """A share for each worker, prefill workers being listed first.

    Only `allowed` CPUs are used. A worker keeps to one NUMA node, so that the memory it touches first is near: each in
    turn goes to the node where the most cores are left for it. Within a node the workers' cores are contiguous, and
    disjoint as long as there are enough (`share_cores`); the hardware threads of a core go together.

    A `quota` (in CPUs) below the number of cores bounds the threads of all workers together, to at least one each. Then
    none is pinned to single cores: other containers on the machine would choose the same ones.
    """
    assert allowed, "no CPUs"
    assert num_workers >= 1, num_workers
    cores = _computing_cores(topology.restricted(allowed))
    by_node: dict[int, list[tuple[Cpu, ...]]] = defaultdict(list)
    for core in cores:
        by_node[core[0].node].append(core)
    nodes = _deal(by_node, topology, num_workers)
    shares: list[CoreShare | None] = [None] * num_workers
    for node, of_node in by_node.items():
        workers = [i for i in range(num_workers) if nodes[i] == node]
        for i, run in zip(workers, share_cores(of_node, len(workers)) if workers else (), strict=True):
            cpus = tuple(sorted(cpu.number for core in run for cpu in core))
            shares[i] = CoreShare(cpus, len(run), node if len(by_node) > 1 else None)
    complete = [share for share in shares if share is not None]
    if quota is None or quota >= len(cores):
        return complete
    return _within_quota(complete, by_node, quota)


def count_threads(topology: Topology, cpus: Collection[int], quota: float | None) -> int:
    """Compute threads for exactly these CPUs: one for each core, no more than the quota gives time to."""
    cores = len({cpu.core for cpu in topology.restricted(cpus)})
    return max(1, cores if quota is None else min(cores, int(quota)))


def divide_share(topology: Topology, share: CoreShare, num_parts: int) -> list[CoreShare]:
    """The parts of a worker's cores that its ranks get, in their order: whole cores, and within one NUMA node each,
    where there are no fewer ranks than nodes.

    A node gets as many ranks as its cores are a share of all; neighbours, which split one layer, lie on one node
    where they can. With one thread a core each part has its cores' number, else an even share of `num_threads`, at
    least one and no more than its CPUs. Where there are fewer cores than parts, none is pinned.
    """
    assert num_parts >= 1, num_parts
    by_core: dict[int, list[Cpu]] = defaultdict(list)
    for cpu in topology.restricted(share.cpus):
        by_core[cpu.core].append(cpu)
    cores = sorted(by_core.values(), key=lambda core: (core[0].node, core[0].core))
    even = max(1, share.num_threads // num_parts)
    if len(cores) < num_parts:
        return [CoreShare((), even)] * num_parts
    has_nodes = len({cpu.node for cpu in topology.cpus}) > 1
    parts = []
    for run in _runs(cores, num_parts):
        cpus = tuple(sorted(cpu.number for core in run for cpu in core))
        nodes = {core[0].node for core in run}
        threads = len(run) if share.num_threads == len(cores) else min(even, len(cpus))
        parts.append(CoreShare(cpus, threads, min(nodes) if has_nodes and len(nodes) == 1 else None))
    return parts


def _runs(cores: Sequence[list[Cpu]], num_parts: int) -> list[tuple[list[Cpu], ...]]:
    """`cores`, sorted by node, cut into runs that cross no node unless there are fewer runs than nodes."""
    by_node: dict[int, list[list[Cpu]]] = defaultdict(list)
    for core in cores:
        by_node[core[0].node].append(core)
    if num_parts < len(by_node):
        return share_cores(cores, num_parts)
    dealt = dict.fromkeys(by_node, 0)
    for _ in range(num_parts):
        best = max(by_node, key=lambda node: (len(by_node[node]) / (dealt[node] + 1), -dealt[node], -node))
        dealt[best] += 1
    return [run for node, of_node in by_node.items() if dealt[node] for run in share_cores(of_node, dealt[node])]


def _within_quota(
    shares: Sequence[CoreShare], by_node: dict[int, list[tuple[Cpu, ...]]], quota: float
) -> list[CoreShare]:
    threads = [len(run) for run in share_cores(range(max(1, int(quota))), len(shares))]
    whole = {node: tuple(sorted(cpu.number for core in cores for cpu in core)) for node, cores in by_node.items()}
    return [
        CoreShare((), count)
        if share.node is None
        else CoreShare(whole[share.node], min(count, len(by_node[share.node])), share.node)
        for share, count in zip(shares, threads, strict=True)
    ]


def _computing_cores(cpus: Sequence[Cpu]) -> list[tuple[Cpu, ...]]:
    """The hardware threads of each core that computes, by the cores' first numbers."""
    by_core: dict[int, list[Cpu]] = defaultdict(list)
    for cpu in cpus:
        by_core[cpu.core].append(cpu)
    cores = [tuple(by_core[core]) for core in sorted(by_core)]
    fast = [core for core in cores if core[0].is_fast]
    return fast if len(fast) >= FEWEST_FAST else cores


def _deal(by_node: dict[int, list[tuple[Cpu, ...]]], topology: Topology, num_workers: int) -> list[int]:
    """The node of each worker. Among equals the one with more free memory comes first."""
    dealt: dict[int, int] = dict.fromkeys(by_node, 0)
    nodes = []
    for _ in range(num_workers):
        best = max(
            by_node, key=lambda node: (len(by_node[node]) / (dealt[node] + 1), topology.free_bytes.get(node, 0), -node)
        )
        dealt[best] += 1
        nodes.append(best)
    return nodes


def share_cores(cores: Sequence[T], num_workers: int) -> list[tuple[T, ...]]:
    """Splits `cores` into one run for each worker, in order.

    With C cores and W ≤ C workers the runs are disjoint, cover all cores, and their lengths differ by at most one;
    the longer ones come first (prefill workers are listed first, and prefill is what more cores speed up most).
    With W > C every worker gets one core, and neighbours share: the cores' numbers of workers differ by at most one.
    Router, KV store and index stay unpinned: they are idle while a step runs.
    """
    assert cores, "no cores"
    assert num_workers >= 1, num_workers
    num_cores = len(cores)
    if num_workers > num_cores:
        return [(cores[i * num_cores // num_workers],) for i in range(num_workers)]
    shortest, num_longer = divmod(num_cores, num_workers)
    runs: list[tuple[T, ...]] = []
    start = 0
    for i in range(num_workers):
        end = start + shortest + (1 if i < num_longer else 0)
        runs.append(tuple(cores[start:end]))
        start = end
    return runs
