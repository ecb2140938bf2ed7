"""Where this process computes: pins it, and sets the number of its compute threads."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from services.worker.settings import WorkerSettings
from shared.cores.core_choice import CoreShare, count_threads, share_machine
from shared.cores.quota import read_quota
from shared.cores.topology import Topology, format_cpu_list, parse_cpu_list, read_topology
from shared.errors import ConfigError

logger = logging.getLogger(__name__)


def choose_cores(
    settings: WorkerSettings, topology: Topology, allowed: frozenset[int], quota: float | None
) -> CoreShare:
    """The CPUs to be pinned to, none where the process stays where it is, and the number of threads.

    `allowed` is the process's own affinity mask. Raises ConfigError for a cpu_affinity that is no list.
    """
    if settings.cpu_affinity:
        try:
            cpus = parse_cpu_list(settings.cpu_affinity)
        except ValueError as error:
            raise not_cores(settings, error) from error
        return CoreShare(cpus, settings.num_threads or count_threads(topology, cpus, quota))
    if settings.is_on_gpu:
        return CoreShare((), settings.num_threads or count_threads(topology, allowed, quota))
    (share,) = share_machine(topology, allowed, quota, 1)
    num_threads = settings.num_threads or share.num_threads
    is_kept = frozenset(share.cpus) != allowed and num_threads <= len(share.cpus)
    return CoreShare(share.cpus if is_kept else (), num_threads, share.node if is_kept else None)


def choose_group_cores(settings: WorkerSettings) -> tuple[CoreShare, Topology]:
    """As `choose_cores` for all of a group's ranks on this host, with CPUs of this process's alone, and the machine
    that they are of. Raises ConfigError."""
    allowed = frozenset(os.sched_getaffinity(0))
    topology = read_topology()
    share = choose_cores(settings, topology, allowed, read_quota())
    cpus = tuple(cpu for cpu in share.cpus if cpu in allowed)  # as the kernel reads a process's mask
    if share.cpus and not cpus:
        raise not_cores(settings, "none of them is this process's")
    return replace(share, cpus=cpus), topology


def take_cores(settings: WorkerSettings) -> None:
    """Applies `choose_cores` to the calling thread and to those that it starts from then on; the memory that they touch
    first is near them. Two engines whose threads share a core stall each other. Raises ConfigError."""
    share = choose_cores(settings, read_topology(), frozenset(os.sched_getaffinity(0)), read_quota())
    try:
        take_share(settings.name, share)
    except (OSError, OverflowError) as error:
        raise not_cores(settings, error) from error


def take_share(name: str, share: CoreShare) -> None:
    """Pins the calling thread and those that it starts, and sets the number of compute threads. Raises OSError or
    OverflowError for CPUs that this machine does not have."""
    if share.cpus:
        os.sched_setaffinity(0, share.cpus)
    torch.set_num_threads(share.num_threads)
    node = "" if share.node is None else f" of NUMA node {share.node}"
    where = f"pinned to CPUs {format_cpu_list(share.cpus)}{node}" if share.cpus else "not pinned"
    logger.info("%s is %s, compute threads: %d", name, where, share.num_threads)


def not_cores(settings: WorkerSettings, reason: Exception | str) -> ConfigError:
    """The ConfigError for a `cpu_affinity` that this machine cannot satisfy."""
    return ConfigError(
        f"cpu_affinity {settings.cpu_affinity!r} does not name cores of this machine: {reason}",
        field="cpu_affinity",
        value=settings.cpu_affinity,
    )
