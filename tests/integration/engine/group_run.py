"""An engine whose model is split over ranks: each follower a thread of the test's process, with the runner of its own
that a follower's process has."""

from __future__ import annotations

import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from shared.collectives.rank_links import RankLinks, join, shared_memories
from shared.engine.engine import Engine
from shared.engine.group.plans import PlanAnnouncer, follow
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load
from shared.kernels.registry import AUTO
from shared.kv.layout import BlockLayout
from shared.kv.pool import BlockPool
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
        **policy,
    ) -> None:
        self.layout = ModelConfig.load(folder).block_layout(BLOCK_SIZE, str(dtype).removeprefix("torch."))
        config = RunnerConfig(max_num_seqs=MAX_NUM_SEQS, num_host_blocks=policy.get("num_host_blocks", 0))
        library = load(choose()[1])
        descriptors = shared_memories(library, degrees.tensor, degrees.pipeline)
        kv_blocks = torch.zeros(self.layout.shape(num_blocks), dtype=dtype)

        def join_as(rank: int) -> tuple[RankLinks, RankDecoder]:
            links = join(library, descriptors, rank, degrees.tensor, degrees.pipeline)
            return links, RankDecoder.load_rank(folder, dtype, kernels, degrees, links, None, placement)

        def run_follower(rank: int, layout: BlockLayout) -> None:
            links, decoder = join_as(rank)
            try:
                follow(links.everyone, Runner(decoder, layout, num_blocks, pool=kv_blocks))
            finally:
                links.close()

        self.threads = ThreadPoolExecutor(degrees.num_ranks)
        self.followers: list[Future[None]] = [
            self.threads.submit(run_follower, rank, self.layout) for rank in range(1, degrees.num_ranks)
        ]
        self.links, self.decoder = join_as(0)
        for descriptor in descriptors:
            os.close(descriptor)
        self.announcer = PlanAnnouncer(self.links.everyone)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, SchedulerConfig(MAX_NUM_SEQS, max_num_batched_tokens, **policy))
        self.runner = Runner(self.decoder, self.layout, num_blocks, config, pool=kv_blocks, announce=self.announcer)
        self.eos = frozenset()
        self.events = queue.Queue()
        self.engine = Engine(self.scheduler, self.runner, self.events.put)
        self.engine.start()
        self.names = 0

    def close(self) -> None:
        """Ends the followers as a leader does; their errors are the test's."""
        super().close()
        self.announcer.end()
        for follower in self.followers:
            follower.result(DEADLINE_S)
        self.links.close()
        self.threads.shutdown()
