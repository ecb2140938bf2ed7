"""The leader's side of a group: starts the followers, watches them while it serves, ends them with itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from services.worker.group.rank_spec import PlacementSpec, PoolSpec, RankSpec
from services.worker.group.shared_pool import map_pool
from shared.collectives.messages import broadcast_bytes
from shared.collectives.rank_links import RankLinks, join, shared_memories
from shared.cores.policy import CoreShare, divide_share
from shared.cores.topology import Topology
from shared.engine.group.plans import PlanAnnouncer
from shared.errors import ConfigError, RankLost, TandemError
from shared.kernels.cpu.build import CannotBuild, choose
from shared.kernels.cpu.group import CpuGroup, lost, shared_memory
from shared.kernels.cpu.launch import load
from shared.kv.layout import BlockLayout
from shared.model.expert_placement import Placement
from shared.model.shard import Degrees
from shared.parent_death import command_dying_with_parent
from shared.telemetry.logs import LogFormat, LogLevel

logger = logging.getLogger(__name__)

FOLLOWER = "services.worker.group.follower"
"""What a follower's process runs."""
WATCH_INTERVAL_S = 0.1
STOPPED_S = 1.0
"""A follower that stays stopped for so long is lost."""
END_TIMEOUT_S = 2.0
"""For followers to end when they are told to."""


class RankGroup:
    """A worker's followers. Made on the thread that lives as long as the process: the kernel ends them with it."""

    def __init__(
        self,
        name: str,
        folder: str,
        degrees: Degrees,
        dtype: torch.dtype,
        kernels: str,
        share: CoreShare,
        topology: Topology,
        logs: tuple[LogFormat, LogLevel] = ("text", "info"),
        placement: Placement = (),
    ) -> None:
        """Starts them; they load their slices behind `meet`, and need no more of the leader than that and `share_pool`.

        `share`: the worker's cores and threads, the leader's own among them, on a machine of that `topology`. Raises
        ConfigError without C++ kernels.
        """
        try:
            library = load(choose()[1])
        except CannotBuild as error:
            raise ConfigError(f"tp and pp above 1 need the C++ kernels: {error}", field="tp") from error
        self.degrees = degrees
        self.dtype = dtype
        """Of weights and computation, on all ranks."""
        self.kernels = kernels
        """Of all ranks, by the registry's name."""
        self.placement = placement
        """Of experts, on all ranks."""
        self._library = library
        self._descriptors = [*shared_memories(library, degrees.tensor, degrees.pipeline), shared_memory()]
        self._closing_s: float | None = None  # since when, by the monotonic clock
        self._all_ended = False
        self._watch: threading.Thread | None = None
        self._links: RankLinks | None = None
        self._announcer: PlanAnnouncer | None = None
        shares = divide_share(topology, share, degrees.num_ranks)
        self.own_share = shares[0]
        """The leader's part of the cores."""
        self.followers = [
            self._start(
                RankSpec(
                    name,
                    rank,
                    degrees.tensor,
                    degrees.pipeline,
                    degrees.expert,
                    tuple(self._descriptors),
                    folder,
                    str(dtype).removeprefix("torch."),
                    kernels,
                    shares[rank].num_threads,
                    tuple(shares[rank].cpus),
                    *logs,
                )
            )
            for rank in range(1, degrees.num_ranks)
        ]

    def _start(self, spec: RankSpec) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", FOLLOWER, spec.to_json()]
        # Its log is the worker's. stdout is the leader's channel to the launcher.
        return subprocess.Popen(
            command_dying_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=self._descriptors,
        )

    def meet(self, on_lost: Callable[[TandemError], None]) -> RankLinks:
        """Waits until all ranks run, and tells them where experts lie. From now on `on_lost`, called from another
        thread, tells of a rank that is gone, at most once. Raises RankLost."""
        self._watch = threading.Thread(target=self._watch_followers, args=(on_lost,), name="ranks", daemon=True)
        tensor, pipeline = self.degrees.tensor, self.degrees.pipeline
        self._links = join(self._library, self._descriptors[:-1], 0, tensor, pipeline, self._check_started)
        self._watch.start()
        broadcast_bytes(self._links.everyone, PlacementSpec(self.placement).to_json())
        return self._links

    def wait_loaded(self) -> None:
        """Waits until all ranks hold their slices, and memory that is free is theirs no longer. Raises RankLost."""
        assert self._links is not None, "meet() first"
        self._links.everyone.gather(torch.zeros(1))

    def share_pool(self, layout: BlockLayout, num_blocks: int, identity: str) -> Tensor:
        """The pool, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], when all ranks have mapped it.

        `identity`: the checkpoint's fingerprint, which theirs must equal. Raises ConfigError, RankLost.
        """
        assert self._links is not None, "meet() first"
        everyone = self._links.everyone
        pool = map_pool(self._descriptors[-1], layout, num_blocks, is_leader=True)
        broadcast_bytes(everyone, PoolSpec(num_blocks, layout.block_size, layout.format.dtype, identity).to_json())
        everyone.gather(torch.zeros(1))
        return pool

    def _check_started(self) -> None:
        for rank, follower in enumerate(self.followers, 1):
            if follower.poll() is not None:
                raise RankLost(
                    f"rank {rank} of this worker's group ended as it started, exit status {follower.returncode}; the "
                    "worker's log says why",
                    rank=rank,
                )

    @property
    def announcer(self) -> PlanAnnouncer:
        """Tells the followers of every plan."""
        assert self._links is not None, "meet() first"
        if self._announcer is None:
            self._announcer = PlanAnnouncer(self._links.everyone)
        return self._announcer

    def close(self) -> None:
        """Ends the followers; the engine has stopped. Twice is fine."""
        self._closing_s = time.monotonic()
        if self._announcer is not None:
            try:
                self._announcer.end()
            except RankLost as error:
                logger.warning("%s", error)
        deadline = self._closing_s + END_TIMEOUT_S
        for follower in self.followers:
            try:
                follower.wait(max(0.0, deadline - time.monotonic()) if self._announcer is not None else 0.0)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()
        self._all_ended = True
        if self._watch is not None and self._watch.is_alive():
            self._watch.join()
        if self._links is not None:
            self._links.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._announcer = None

    def _watch_followers(self, on_lost: Callable[[TandemError], None]) -> None:
        """A child's end shows at once, and so does one that was stopped, also while no step waits for it. A step that
        does not end shows as in any worker: the engine does not come back."""
        assert self._links is not None
        everyone = self._links.everyone
        assert isinstance(everyone, CpuGroup)
        stopped = [0.0] * len(self.followers)
        while not self._all_ended:
            rank, statuses = everyone.lost_rank(), [follower.poll() for follower in self.followers]
            # Read behind what it explains: told to end, a follower may leave and end; one that does not must not keep
            # the leader waiting for it.
            closing_s = self._closing_s
            is_late = closing_s is not None and time.monotonic() - closing_s > END_TIMEOUT_S
            rank = rank if closing_s is None else None
            for number, (follower, status) in enumerate(zip(self.followers, statuses, strict=True)):
                ended = status is not None and not (closing_s is not None and status == 0)
                is_running = status is None
                stopped[number] = stopped[number] + WATCH_INTERVAL_S if is_running and is_stopped(follower.pid) else 0.0
                if ended or stopped[number] > STOPPED_S or (is_late and is_running):
                    rank = number + 1
            if rank is not None:
                self._links.fail(rank)
                if closing_s is None:
                    on_lost(lost(rank))
                return
            time.sleep(WATCH_INTERVAL_S)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process: not the want of a core, nor a debugger."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
