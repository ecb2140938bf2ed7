"""A follower rank: loads its slice of the model and runs the leader's plans until the leader ends it."""

from __future__ import annotations

import logging
import os

import torch

from services.worker.group.rank_spec import PlacementSpec, PoolSpec, RankSpec
from services.worker.group.shared_pool import map_pool
from services.worker.machine.pool_size import PoolNeed
from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.rank_links import RankLinks
from shared.engine.group.own_slices import SliceForm
from shared.engine.group.plans import follow
from shared.engine.group.rank_adapters import AdapterFollower
from shared.engine.group.slice_server import SliceServer
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.errors import ModelMismatch, RankLost, TandemError
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
from shared.kv.layout import BlockLayout
from shared.model.ranks.block_slices import block_slices
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.weights.loader import fingerprint
from shared.telemetry.logs import set_up_logs

logger = logging.getLogger(__name__)


def run(spec: RankSpec) -> None:
    """Loads this rank's slice and computes the leader's plans until it ends them. Raises TandemError."""
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    torch.set_num_threads(spec.num_threads)
    DeviceLink(torch.device(spec.device)).bind_thread()
    links = spec.join(load(choose()[1]))
    try:
        _serve(spec, links, spec.descriptors[-1])
    except BaseException:
        # Not closed: the thread that serves slices may still wait in them. They end with the process.
        links.fail(spec.rank)
        raise
    links.close()


def _serve(spec: RankSpec, links: RankLinks, pool_descriptor: int) -> None:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    links.everyone.gather(torch.zeros(1))  # tells the leader that this rank has joined
    placement = PlacementSpec.parse(broadcast_bytes(links.everyone)).placement
    where = (links, None, placement, spec.device, spec.quantization)
    decoder = RankDecoder.load_rank(spec.folder, dtype, spec.kernels, spec.degrees, *where)
    links.everyone.gather(torch.zeros(1))  # tells the leader that this rank's slice is loaded
    if spec.senders:
        need = PoolNeed.parse(broadcast_bytes(links.everyone))
        own = decoder.own_layout(need.block_size, need.kv_dtype)
        fitting = need.budget(decoder, own, follows=True).num_blocks(own)
        links.everyone.gather(torch.tensor([fitting], dtype=torch.int64))
    pool = PoolSpec.parse(broadcast_bytes(links.everyone))
    found = fingerprint(spec.folder, spec.dtype, spec.quantization)
    if found != pool.identity:
        raise ModelMismatch(
            f"rank {spec.rank} read a checkpoint with fingerprint {found}, the leader one with {pool.identity}",
            field="model",
        )
    grouped = spec.degrees.has_kv_groups
    layout = decoder.config.block_layout(pool.block_size, pool.kv_dtype, grouped=grouped)
    if spec.senders:
        _follow_with_own_pool(spec, links, decoder, layout, pool)
        return
    kv_blocks = map_pool(pool_descriptor, layout, pool.num_blocks, is_leader=False)
    _follow(links, Runner(decoder, layout, pool.num_blocks, pool=kv_blocks), decoder)


def _follow(links: RankLinks, runner: Runner, decoder: RankDecoder) -> None:
    adapters = None if links.adapters is None else AdapterFollower(links, decoder, runner.link)
    if adapters is not None:
        adapters.start()
    links.everyone.gather(torch.zeros(1))  # tells the leader that this rank is ready
    if adapters is None:
        follow(links.everyone, runner)
    else:
        follow(links.everyone, runner, adapters.take)
        adapters.join()


def _follow_with_own_pool(
    spec: RankSpec, links: RankLinks, decoder: RankDecoder, layout: BlockLayout, pool: PoolSpec
) -> None:
    config = RunnerConfig(
        pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        warm_up=False,  # the leader's plans do that
        staged_transfer=False,  # whole blocks are the leader's
        num_host_blocks=pool.num_host_blocks,
    )
    runner = Runner(decoder, decoder.own_layout(pool.block_size, pool.kv_dtype), pool.num_blocks, config)
    form = SliceForm(layout, block_slices(decoder.config, spec.degrees))
    server = SliceServer(form, links, runner.kv_blocks, runner.link, runner.arena)
    server.start()
    with torch.inference_mode():
        runner.start()
    _follow(links, runner, decoder)
    server.join()


def main(spec: RankSpec) -> int:
    """Exit status of its process: 0 when the leader ended it, 2 for a TandemError, which is logged."""
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
