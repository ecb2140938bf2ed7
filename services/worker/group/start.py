"""How a worker that is a group begins: what all ranks have in common, the followers, the leader's runner."""

from __future__ import annotations

import torch
from torch import distributed

from services.worker.group.leader import RankGroup
from services.worker.group.meeting.leader_port import open_meeting
from services.worker.machine.choices import check_device, choose_backend, choose_dtype
from services.worker.settings import WorkerSettings
from shared.collectives.rank_links import Ways
from shared.cores.core_choice import CoreShare
from shared.cores.topology import Topology
from shared.engine.group.own_slices import SliceForm
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.errors import ConfigError
from shared.kv.layout import BlockLayout
from shared.model.families.registry import load_config
from shared.model.kernel_choice import kernels_for
from shared.model.layers.expert_placement import Placement
from shared.model.ranks.block_slices import block_slices, senders
from shared.model.ranks.rank_decoder import RankDecoder
from shared.structure.compiler import StructureCompiler


def check_group(settings: WorkerSettings) -> tuple[torch.dtype, str]:
    """The dtype and the kernels of all ranks: `auto` is decided once, as its timings may differ. Blocking. Raises
    ConfigError where the ranks cannot share the model, or there are not enough GPUs for them."""
    config, backend = load_config(settings.model), choose_backend(settings)
    settings.degrees.check(config, own_pools=settings.has_own_pools)
    if settings.backend == "nccl" and not distributed.is_nccl_available():
        raise ConfigError(
            f"collectives is {settings.collectives}, which is nccl on {settings.device}, but this torch is built "
            "without NCCL: take gloo",
            field="collectives",
        )
    devices = settings.devices
    if settings.is_on_gpu and (count := torch.cuda.device_count()) < len(devices):
        raise ConfigError(
            f"tp {settings.tp} times pp {settings.pp} takes {len(devices)} GPUs, torch sees {count} on this machine",
            field="tp",
            value=len(devices),
            limit=count,
        )
    for device in devices:
        check_device(device)
    dtype = choose_dtype(settings.dtype, config, settings.device, backend)
    if dtype == torch.float16 and not settings.is_on_gpu:
        raise ConfigError("on a CPU, tp and pp above 1 compute in float32 and bfloat16, not in float16", field="dtype")
    return dtype, kernels_for(config, devices[0], dtype, backend).name


def start_group(
    settings: WorkerSettings,
    dtype: torch.dtype,
    kernels: str,
    placement: Placement,
    cores: tuple[CoreShare, Topology],
) -> RankGroup:
    """The followers, started. On the thread that lives as long as the process. `cores`: see `choose_group_cores`.
    Raises ConfigError."""
    share, topology = cores
    degrees = settings.degrees
    sending = senders(load_config(settings.model), degrees) if settings.has_own_pools else ()
    ways = Ways(
        degrees.tensor,
        degrees.pipeline,
        settings.backend,
        senders=sending,
        hosts=settings.group_hosts,
        has_adapters=settings.has_adapters,
    )
    meeting = open_meeting(settings) if settings.group_hosts > 1 else None
    try:
        return RankGroup(
            settings.name,
            str(settings.model),
            degrees,
            dtype,
            kernels,
            share,
            topology,
            (settings.log_format, settings.log_level),
            placement,
            ways,
            meeting,
            settings.devices,
            settings.quantization,
        )
    except BaseException:
        if meeting is not None:
            meeting.close()
        raise


def leader_runner(
    group: RankGroup,
    decoder: RankDecoder,
    layout: BlockLayout,
    num_blocks: int,
    config: RunnerConfig,
    structures: StructureCompiler,
    identity: str,
) -> Runner:
    """The leader's, when the followers have theirs; `layout` is of whole blocks, `identity` as for `share_pool`. Raises
    ConfigError, RankLost."""
    pool = group.share_pool(layout, num_blocks, identity, config)
    own, slices = layout, None
    if group.has_own_pools:
        own = decoder.own_layout(layout.block_size, layout.dtype)
        slices = group.open_slices(SliceForm(layout, block_slices(decoder.config, group.degrees)))
    return Runner(
        decoder,
        own,
        num_blocks,
        config,
        structures=structures,
        pool=pool,
        announce=group.announcer,
        slices=slices,
    )
