"""An engine whose model is split over ranks: each follower a thread of the test's process, with the runner of its own
that a follower's process has."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from shared.engine.group.slice_server import SliceServer
from shared.engine.group.sliced_blocks import SlicedBlocks
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load
from shared.kernels.registry import AUTO
from shared.kv.pool import BlockPool
from shared.model.block_slices import block_slices, senders
from shared.model.config import ModelConfig
from shared.model.expert_placement import Placement
from shared.model.rank_decoder import RankDecoder
from shared.model.shard import Degrees
from tests.integration.engine.engine_run import BLOCK_SIZE, DEADLINE_S, MAX_NUM_SEQS, EngineRun


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
        placement: Placement = (),
        own_pools: bool = False,
        backend: Backend = "shm",
        hosts: int = 1,
        devices: Sequence[str] = (),
        **policy,
    ) -> None:
        """`own_pools`: each rank has its slices of blocks alone, else they share one pool. With several `hosts`, ranks
        of one have messages' memory in common, all others TCP alone. `devices`: of each rank, none = the CPU."""
        places = [torch.device(name) for name in devices or ["cpu"] * degrees.num_ranks]
        kv_dtype, model = str(dtype).removeprefix("torch."), ModelConfig.load(folder)
        self.layout = model.block_layout(BLOCK_SIZE, kv_dtype)
        config = RunnerConfig(max_num_seqs=MAX_NUM_SEQS, num_host_blocks=policy.get("num_host_blocks", 0))
        follower = replace(config, warm_up=False)
        form = SliceForm(self.layout, block_slices(model, degrees))
        ways = Ways(
            degrees.tensor, degrees.pipeline, backend, senders=senders(model, degrees) if own_pools else (), hosts=hosts
        )
        library = load(choose()[1])
        descriptors: list[int] = []
        if hosts == 1:
            descriptors = shared_memories(library, ways)
        else:
            store = StoreServer("127.0.0.1")
            place = MeetingPlace(store.address, store.token, "127.0.0.1")
            memories = [host_memories(library, ways, host) for host in range(hosts)]
            descriptors = [descriptor for of_host in memories for descriptor in of_host]
        shared = None if own_pools else torch.zeros(self.layout.shape(num_blocks), dtype=dtype)

        def join_as(rank: int) -> tuple[RankLinks, RankDecoder]:
            DeviceLink(places[rank]).bind_thread()
            if hosts == 1:
                links = join(library, descriptors, rank, ways)
            else:
                links = several_hosts.join(library, memories[ways.host_of(rank)], rank, ways, place)
            return links, RankDecoder.load_rank(folder, dtype, kernels, degrees, links, None, placement, places[rank])

        def run_follower(rank: int) -> None:
            links, decoder = join_as(rank)
            try:
                if shared is not None:
                    follow(links.everyone, Runner(decoder, self.layout, num_blocks, pool=shared))
                    return
                runner = Runner(decoder, decoder.own_layout(BLOCK_SIZE, kv_dtype), num_blocks, follower)
                server = SliceServer(form, links, runner.kv_blocks, runner.link, runner.arena)
                server.start()
                with torch.inference_mode():
                    runner.start()
                follow(links.everyone, runner)
                server.join()
            finally:
                links.close()

        self.threads = ThreadPoolExecutor(degrees.num_ranks)
        self.followers: list[Future[None]] = [
            self.threads.submit(run_follower, rank) for rank in range(1, degrees.num_ranks)
        ]
        self.links, self.decoder = join_as(0)
        for descriptor in descriptors:
            os.close(descriptor)
        self.announcer = PlanAnnouncer(self.links.everyone)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, SchedulerConfig(MAX_NUM_SEQS, max_num_batched_tokens, **policy))
        own = self.decoder.own_layout(BLOCK_SIZE, kv_dtype) if own_pools else self.layout
        slices = partial(SlicedBlocks, form, self.links) if own_pools else None
        self.runner = Runner(self.decoder, own, num_blocks, config, pool=shared, announce=self.announcer, slices=slices)
        with torch.inference_mode():
            self.runner.start()
        self.eos = frozenset()
        self.events = queue.Queue()
        self.engine = Engine(self.scheduler, self.runner, self.events.put)
        self.engine.start()
        self.names = 0

    def close(self) -> None:
        """Ends the followers as a leader does; their errors are the test's."""
        super().close()
        self.announcer.close()
        if isinstance(self.runner.blocks, SlicedBlocks):
            self.runner.blocks.close()
        for follower in self.followers:
            follower.result(DEADLINE_S)
        self.links.close()
        self.threads.shutdown()
