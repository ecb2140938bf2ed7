"""An engine whose model is split over ranks: each follower a thread of the test's process, with the runner of its own
that a follower's process has."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shared.collectives import several_hosts
from shared.collectives.one_host import join, shared_memories
from shared.collectives.rank_links import Backend, RankLinks, Ways
from shared.collectives.several_hosts import MeetingPlace, StoreServer, host_memories
from shared.engine.engine import Engine
from shared.engine.group.own_slices import SliceForm
from shared.engine.group.plans import PlanAnnouncer, follow
from shared.engine.group.rank_adapters import AdapterFollower, GroupAdapters
from shared.engine.group.slice_server import SliceServer
from shared.engine.group.sliced_blocks import SlicedBlocks
from shared.engine.messages import PlaceAdapter
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.speculation.speculator import Speculator
from shared.kernels.backends.registry import AUTO
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
from shared.kernels.lora.parts import MAX_RANK
from shared.kernels.pool_view import dtype_name
from shared.kv.pool import BlockPool
from shared.model.adapters.adapter import MAX_BYTES
from shared.model.families.registry import load_config
from shared.model.layers.expert_placement import Placement
from shared.model.ranks.block_slices import block_slices, senders
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.ranks.shard import Degrees
from shared.structure.compiler import StructureCompiler
from tests.integration.engine.engine_run import BLOCK_SIZE, MAX_NUM_SEQS, EngineRun
from tests.waiting import DEADLINE_S


class GroupRun(EngineRun):
    """See `EngineRun`."""

    def __init__(
        self,
        folder: Path,
        degrees: Degrees,
        num_blocks: int = 64,
        max_num_batched_tokens: int = 24,
        *,
        kernels: str = AUTO,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str = "",
        placement: Placement = (),
        own_pools: bool = False,
        backend: Backend = "shm",
        hosts: int = 1,
        devices: Sequence[str] = (),
        speculator: Speculator | None = None,
        has_adapters: bool = False,
        ahead: bool | None = None,
        structures: StructureCompiler | None = None,
        **policy,
    ) -> None:
        """`num_blocks`: of each KV group. `own_pools`: each rank has its slices of blocks alone, else they share one
        pool. With several `hosts`, ranks of one have messages' memory in common, all others TCP alone. `devices`: of
        each rank, none = the CPU."""
        self.places = [torch.device(name) for name in devices or ["cpu"] * degrees.num_ranks]
        kv_dtype, model = kv_dtype or dtype_name(dtype), load_config(folder)
        self.layout = model.block_layout(BLOCK_SIZE, kv_dtype, grouped=degrees.has_kv_groups)
        num_blocks *= self.layout.groups.size
        config = RunnerConfig(max_num_seqs=MAX_NUM_SEQS, num_host_blocks=policy.get("num_host_blocks", 0))
        form = SliceForm(self.layout, block_slices(model, degrees))
        sending = senders(model, degrees) if own_pools else ()
        ways = Ways(degrees.tensor, degrees.pipeline, backend, senders=sending, hosts=hosts, has_adapters=has_adapters)
        self.meeting = _Meeting(ways)
        shared = None if own_pools else torch.zeros(self.layout.shape(num_blocks), dtype=torch.uint8)
        self.joined: list[RankLinks] = []

        def join_as(rank: int) -> tuple[RankLinks, RankDecoder]:
            DeviceLink(self.places[rank]).bind_thread()
            links = self.meeting.join(rank)
            self.joined.append(links)
            place = self.places[rank]
            return links, RankDecoder.load_rank(folder, dtype, kernels, degrees, links, None, placement, place)

        def run_follower(rank: int) -> None:
            links, decoder = join_as(rank)
            if shared is not None:
                _follow(links, Runner(decoder, self.layout, num_blocks, pool=shared), decoder)
            else:
                follower = replace(config, warm_up=False, staged_transfer=False)
                layout = decoder.own_layout(BLOCK_SIZE, kv_dtype)
                _follow_with_own_pool(form, links, Runner(decoder, layout, num_blocks, follower), decoder)

        self.threads = ThreadPoolExecutor(degrees.num_ranks)
        self.followers: list[Future[None]] = [
            self.threads.submit(run_follower, rank) for rank in range(1, degrees.num_ranks)
        ]
        with self._ended_on_failure():
            self.links, self.decoder = join_as(0)
            self.announcer = PlanAnnouncer(self.links.everyone)
            self.adapters = None if self.links.adapters is None else GroupAdapters(self.links.adapters, self.decoder)
            self.pool = BlockPool(num_blocks, BLOCK_SIZE)
            self.scheduler = Scheduler(
                self.pool,
                SchedulerConfig(MAX_NUM_SEQS, max_num_batched_tokens, **policy),
                groups=self.layout.groups,
                speculator=speculator,
            )
            own = self.decoder.own_layout(BLOCK_SIZE, kv_dtype) if own_pools else self.layout
            slices = partial(SlicedBlocks, form, self.links) if own_pools else None
            self.runner = Runner(
                self.decoder,
                own,
                num_blocks,
                config,
                structures=structures,
                pool=shared,
                announce=self.announcer,
                slices=slices,
            )
            with torch.inference_mode():
                self.runner.start()
        self.eos = frozenset()
        self.events = queue.Queue()
        self.engine = Engine(self.scheduler, self.runner, self.events.put, ahead)
        self.engine.start()
        self.names = 0

    def place(self, slot: int, folder: Path) -> None:
        """Puts an adapter into a slot of all ranks."""
        assert self.adapters is not None
        self.engine.submit(PlaceAdapter(slot, self.adapters.read(folder, MAX_RANK, MAX_BYTES).packed))

    def close(self) -> None:
        """Ends the followers as a leader does; their errors are the test's."""
        super().close()
        with self._ended_on_failure():
            if self.adapters is not None:
                self.adapters.close()
            self.announcer.close()
            if isinstance(self.runner.blocks, SlicedBlocks):
                self.runner.blocks.close()
            for follower in self.followers:
                follower.result(DEADLINE_S)
        for links in self.joined:
            links.close()
        self.threads.shutdown()
        self.meeting.close()

    @contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        """Ends all ranks' waits where one fails: the test's process would wait for its threads without end."""
        try:
            yield
        except BaseException:
            for links in self.joined:
                links.fail(0)
            self.threads.shutdown(wait=False)
            raise


class _Meeting:
    """What ranks that are threads join by."""

    def __init__(self, ways: Ways) -> None:
        self._ways, self._library = ways, load(choose()[1])
        if ways.hosts == 1:
            self._memories = [shared_memories(self._library, ways)]
        else:
            self._store = StoreServer("127.0.0.1")
            self._place = MeetingPlace(self._store.address, self._store.token, "127.0.0.1")
            self._memories = [host_memories(self._library, ways, host) for host in range(ways.hosts)]

    def join(self, rank: int) -> RankLinks:
        if self._ways.hosts == 1:
            return join(self._library, self._memories[0], rank, self._ways)
        memories = self._memories[self._ways.host_of(rank)]
        return several_hosts.join(self._library, memories, rank, self._ways, self._place)

    def close(self) -> None:
        """Behind the last call: NCCL opens what it meets by at its first one."""
        for descriptor in (descriptor for memories in self._memories for descriptor in memories):
            os.close(descriptor)


def _follow(links: RankLinks, runner: Runner, decoder: RankDecoder) -> None:
    if links.adapters is None:
        follow(links.everyone, runner)
        return
    adapters = AdapterFollower(links, decoder, runner.link)
    adapters.start()
    follow(links.everyone, runner, adapters.take)
    adapters.join()


def _follow_with_own_pool(form: SliceForm, links: RankLinks, runner: Runner, decoder: RankDecoder) -> None:
    server = SliceServer(form, links, runner.kv_blocks, runner.link, runner.arena)
    server.start()
    with torch.inference_mode():
        runner.start()
    _follow(links, runner, decoder)
    server.join()
