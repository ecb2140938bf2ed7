"""`python -m services.worker.group.follower SPEC`: a rank beside a leader, which starts it and ends it."""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch

from services.worker.group.rank_spec import PlacementSpec, PoolSpec, RankSpec
from services.worker.group.shared_pool import map_pool
from shared.collectives.messages import broadcast_bytes
from shared.collectives.rank_links import RankLinks, join
from shared.engine.group.plans import follow
from shared.engine.runner.runner import Runner
from shared.errors import ModelMismatch, RankLost, TandemError
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load
from shared.model.rank_decoder import RankDecoder
from shared.model.weights import fingerprint
from shared.telemetry.logs import set_up_logs

logger = logging.getLogger(__name__)


def run(spec: RankSpec) -> None:
    """Loads this rank's slice and computes the leader's plans until it ends them. Raises TandemError."""
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    torch.set_num_threads(spec.num_threads)
    *groups, pool = spec.descriptors
    links = join(load(choose()[1]), groups, spec.rank, spec.tensor, spec.pipeline)
    try:
        _serve(spec, links, pool)
    finally:
        links.close()


def _serve(spec: RankSpec, links: RankLinks, pool_descriptor: int) -> None:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    placement = PlacementSpec.parse(broadcast_bytes(links.everyone)).placement
    decoder = RankDecoder.load_rank(spec.folder, dtype, spec.kernels, spec.degrees, links, None, placement)
    links.everyone.gather(torch.zeros(1))  # tells the leader that this rank's slice is loaded
    pool = PoolSpec.parse(broadcast_bytes(links.everyone))
    found = fingerprint(spec.folder, spec.dtype)
    if found != pool.identity:
        raise ModelMismatch(
            f"rank {spec.rank} read a checkpoint with fingerprint {found}, the leader one with {pool.identity}",
            field="model",
        )
    layout = decoder.config.block_layout(pool.block_size, pool.kv_dtype)
    kv_blocks = map_pool(pool_descriptor, layout, pool.num_blocks, is_leader=False)
    links.everyone.gather(torch.zeros(1))  # tells the leader that this rank is ready
    follow(links.everyone, Runner(decoder, layout, pool.num_blocks, pool=kv_blocks))


def main() -> int:
    """Exit status: 0 when the leader ended it, 2 for a TandemError, which is logged."""
    # The leader drains; who stops a whole process group must not end its ranks before that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = RankSpec.parse(sys.argv[1])
    set_up_logs(f"{spec.name} rank {spec.rank}", spec.log_format, spec.log_level)
    try:
        run(spec)
    except RankLost as error:
        logger.warning("%s", error)
        return 2
    except TandemError as error:
        logger.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
