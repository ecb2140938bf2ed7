"""The leader's side of a group: starts the followers, watches them while it serves, ends them with itself."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.group.meeting.leader_port import MeetingPort
from services.worker.group.rank_processes import END_TIMEOUT_S, FOLLOWER, WATCH_INTERVAL_S, RankProcess
from services.worker.group.rank_spec import PlacementSpec, PoolSpec, RankSpec
from services.worker.group.shared_pool import map_pool
from services.worker.machine.pool_size import PoolNeed
from shared.collectives import one_host
from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.cpu_group import CpuGroup, lost, shared_memory
from shared.collectives.rank_links import RankLinks, Ways
from shared.collectives.several_hosts import host_memories
from shared.cores.core_choice import CoreShare, divide_share
from shared.cores.topology import Topology
from shared.engine.group.own_slices import SliceForm
from shared.engine.group.plans import PlanAnnouncer
from shared.engine.group.rank_adapters import GroupAdapters
from shared.engine.group.sliced_blocks import SlicedBlocks
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pool_memory import HostArena
from shared.engine.runner.runner import OpenSlices, RunnerConfig
from shared.errors import ConfigError, RankLost, TandemError
from shared.kernels.cpu.build import CannotBuild, choose
from shared.kernels.cpu.library import load
from shared.kernels.pool_view import dtype_name
from shared.kv.layout import BlockLayout
from shared.model.layers.expert_placement import Placement
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.ranks.shard import Degrees
from shared.model.weights.plan import Quantization
from shared.telemetry.logs import LogFormat, LogLevel

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0
"""Between warnings that hosts are missing."""


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
        ways: Ways | None = None,
        meeting: MeetingPort | None = None,
        devices: Sequence[str] = (),
        quantization: Quantization = "auto",
    ) -> None:
        """Starts those of this host; they load their slices behind `meet`, and need no more of the leader than that and
        `share_pool`.

        `share`: the worker's cores and threads, the leader's own among them, on a machine of that `topology`. `ways`:
        by default through the host's memory, over one pool. `meeting`: with the members of other hosts, which start
        the ranks there; closed with the group. `devices`: of each rank; none = the CPU. `quantization`: as for
        `Decoder.load`. Raises ConfigError without C++ kernels.
        """
        try:
            library = load(choose()[1])
        except CannotBuild as error:
            raise ConfigError(f"tp and pp above 1 need the C++ kernels: {error}", field="tp") from error
        self.degrees = degrees
        self.dtype = dtype
        """Dtype of weights and computation, on all ranks."""
        self.kernels = kernels
        """Kernels of all ranks, by the registry's name."""
        self.placement = placement
        """Placement of experts, on all ranks."""
        self._quantization: Quantization = quantization
        self._library = library
        of_rank = tuple(devices) or ("cpu",) * degrees.num_ranks
        self._ways = ways = ways or Ways(degrees.tensor, degrees.pipeline)
        self._meeting = meeting
        memories = one_host.shared_memories(library, ways) if meeting is None else host_memories(library, ways, 0)
        self._descriptors = [*memories, shared_memory()]
        self._closing_s: float | None = None  # since when, by the monotonic clock
        self._all_ended = False
        self._watch: threading.Thread | None = None
        self._links: RankLinks | None = None
        self._announcer: PlanAnnouncer | None = None
        self._blocks: SlicedBlocks | None = None
        self._adapters: GroupAdapters | None = None
        self._lost: int | None = None  # the rank that is gone
        shares = divide_share(topology, share, len(ways.ranks_of(0)))
        self.own_share = shares[0]
        """The leader's part of the cores."""
        self._spec = self._own_spec(name, folder, of_rank[0], logs)
        if meeting is not None:
            meeting.open(self._spec)
        self.followers: list[RankProcess] = []
        try:
            for rank, own in enumerate(shares[1:], 1):
                spec = self._spec.of_rank(rank, self._spec.descriptors, own, of_rank[rank])
                self.followers.append(RankProcess(spec, FOLLOWER))
        except OSError as error:
            self.close()
            raise RankLost(f"the ranks of this worker's group cannot be started: {error}") from error

    def _own_spec(self, name: str, folder: str, device: str, logs: tuple[LogFormat, LogLevel]) -> RankSpec:
        """The leader's; what all ranks have in common is in it."""
        return RankSpec(
            name,
            0,
            self.degrees.tensor,
            self.degrees.pipeline,
            self.degrees.expert,
            self._ways.backend,
            self._ways.senders,
            tuple(self._descriptors),
            folder,
            dtype_name(self.dtype),
            self.kernels,
            device,
            self.own_share.num_threads,
            tuple(self.own_share.cpus),
            *logs,
            self._ways.hosts,
            None if self._meeting is None else self._meeting.place,
            self._quantization,
            self._ways.has_adapters,
        )

    def meet(self, on_lost: Callable[[TandemError], None]) -> RankLinks:
        """Waits until all ranks run, and tells them where experts lie. From now on `on_lost`, called from another
        thread, tells of a rank that is gone, at most once. Raises RankLost."""
        self._watch = threading.Thread(target=self._watch_followers, args=(on_lost,), name="ranks", daemon=True)
        DeviceLink(torch.device(self._spec.device)).bind_thread()
        self._wait_for_hosts()
        self._links = self._spec.join(self._library, self._check_started)
        self._watch.start()
        self._links.everyone.gather(torch.zeros(1))  # all ranks have joined all of their groups
        if self._meeting is not None:
            self._meeting.close_store()
        broadcast_bytes(self._links.everyone, PlacementSpec(self.placement).to_json())
        return self._links

    def wait_loaded(self) -> None:
        """Waits until all ranks hold their slices, and memory that is free is theirs no longer. Raises RankLost."""
        assert self._links is not None, "meet() first"
        self._links.everyone.gather(torch.zeros(1))

    def _wait_for_hosts(self) -> None:
        """Waits as long as it takes: another host may still be bringing the model, or start itself. Raises RankLost."""
        logged_at = time.monotonic()
        while self._meeting is not None and (missing := set(range(1, self._ways.hosts)) - set(self._meeting.present)):
            self._check_started()
            if time.monotonic() - logged_at > _LOG_INTERVAL_S:
                logger.warning("this worker's group still waits for hosts %s", ", ".join(map(str, sorted(missing))))
                logged_at = time.monotonic()
            time.sleep(WATCH_INTERVAL_S)

    @property
    def has_own_pools(self) -> bool:
        """Whether each rank has its slices of blocks alone."""
        return bool(self._ways.senders)

    def held_bytes(self, form: SliceForm) -> int:
        """Bytes of one block on all ranks of a host together, where ranks have pools of their own: on the host that
        holds most. Some may hold the same."""
        hosts = range(self._ways.hosts)
        return max(sum(form.num_bytes[rank] for rank in self._ways.ranks_of(host)) for host in hosts)

    def ask_for_room(self, need: PoolNeed) -> None:
        """Before `fewest`, where ranks have pools of their own: the followers look how many blocks they have room for,
        on GPUs together with the leader. Raises RankLost."""
        assert self._links is not None, "meet() first"
        broadcast_bytes(self._links.everyone, need.to_json())

    def fewest(self, own: int) -> int:
        """The number of blocks that every rank has room for; `own`: the leader. Raises RankLost."""
        assert self._links is not None, "meet() first"
        found = self._links.everyone.gather(torch.tensor([own], dtype=torch.int64))
        assert found is not None
        return int(found.min())

    def share_pool(
        self, layout: BlockLayout, num_blocks: int, identity: str, config: RunnerConfig | None = None
    ) -> Tensor | None:
        """The pool, [num_blocks, num_layers, 2, num_kv_heads, head_bytes] uint8, when all ranks have mapped it;
        None when the followers have made pools of their own.

        `identity`: the checkpoint's fingerprint, which theirs must equal. `config`: of the leader's runner. Raises
        ConfigError, RankLost.
        """
        config = config or RunnerConfig()
        assert self._links is not None, "meet() first"
        everyone, pool = self._links.everyone, None
        if not self.has_own_pools:
            pool = map_pool(self._descriptors[-1], layout, num_blocks, is_leader=True)
        spec = PoolSpec(
            num_blocks,
            layout.block_size,
            layout.format.dtype,
            config.num_host_blocks,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            identity,
        )
        broadcast_bytes(everyone, spec.to_json())
        everyone.gather(torch.zeros(1))
        return pool

    def open_slices(self, form: SliceForm) -> OpenSlices:
        """For the leader's runner, where ranks have pools of their own; `form` is the followers' too."""

        def opened(kv_blocks: Tensor, link: DeviceLink, arena: HostArena | None) -> SlicedBlocks:
            assert self._links is not None, "meet() first"
            self._blocks = SlicedBlocks(form, self._links, kv_blocks, link, arena)
            return self._blocks

        return opened

    def open_adapters(self, decoder: RankDecoder) -> GroupAdapters:
        """What reads adapters on all ranks; closed with the group. `decoder`: the leader's."""
        assert self._links is not None, "meet() first"
        assert self._links.adapters is not None, "a group without adapters"
        if self._adapters is None:
            self._adapters = GroupAdapters(self._links.adapters, decoder)
        return self._adapters

    def _check_started(self) -> None:
        if self._closing_s is not None:
            raise RankLost("this worker's group ends before all of its ranks have come")
        for follower in self.followers:
            if (status := follower.status()) is not None:
                raise RankLost(
                    f"rank {follower.rank} of this worker's group ended as it started, exit status {status}; the "
                    "worker's log says why",
                    rank=follower.rank,
                )
        if self._meeting is not None and self._meeting.lost_rank is not None:
            raise lost(self._meeting.lost_rank)

    @property
    def announcer(self) -> PlanAnnouncer:
        """Broadcasts every plan to the followers."""
        assert self._links is not None, "meet() first"
        if self._announcer is None:
            self._announcer = PlanAnnouncer(self._links.everyone, self._check_whole)
        return self._announcer

    def _check_whole(self) -> None:
        if self._lost is not None:
            raise lost(self._lost)

    def close(self) -> None:
        """Ends the followers; the engine has stopped. Twice is fine."""
        self._closing_s = time.monotonic()
        if self._meeting is not None:
            self._meeting.expect_ends()
        for channel in (self._blocks, self._adapters, self._announcer):
            try:
                if channel is not None:
                    channel.close()
            except RankLost as error:
                logger.warning("%s", error)
        deadline = self._closing_s + END_TIMEOUT_S
        for follower in self.followers:
            follower.end_by(deadline if self._announcer is not None else 0.0)
        if self._meeting is not None:
            self._meeting.close()
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
        while not self._all_ended:
            rank, statuses = self._lost_elsewhere(), [follower.status() for follower in self.followers]
            # Read behind what it explains: a follower that was asked to end may have ended; one that has not must not
            # keep the leader waiting.
            closing_s = self._closing_s
            is_late = closing_s is not None and time.monotonic() - closing_s > END_TIMEOUT_S
            rank = rank if closing_s is None else None
            hosts = () if self._meeting is None else self._meeting.present
            if is_late and hosts:
                rank = self._ways.ranks_of(min(hosts))[0]
            for follower, status in zip(self.followers, statuses, strict=True):
                ended = status is not None and not (closing_s is not None and status == 0)
                if ended or follower.is_stuck() or (is_late and status is None):
                    rank = follower.rank
            if rank is not None:
                self._lost = rank  # before any result that depends on the lost rank is used
                for follower in self.followers:  # its open connections would keep other ranks waiting
                    if follower.rank == rank:
                        follower.kill()
                try:
                    self._links.fail(rank)
                finally:
                    if closing_s is None:
                        on_lost(lost(rank))
                return
            time.sleep(WATCH_INTERVAL_S)

    def _lost_elsewhere(self) -> int | None:
        """A rank that others have noticed: those that share memory with the leader, or another host's member."""
        assert self._links is not None
        for group in (self._links.everyone, self._links.stage):
            if isinstance(group, CpuGroup) and (rank := group.lost_rank()) is not None:
                return rank
        return None if self._meeting is None else self._meeting.lost_rank
