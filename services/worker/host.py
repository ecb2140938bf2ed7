"""One engine process: loads the model, owns engine, transfer plane and index publisher."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from services.worker.cores import choose_cores, not_cores, take_cores, take_share
from services.worker.group.expert_balance import ExpertBalance
from services.worker.group.leader import RankGroup
from services.worker.self_test import self_test
from services.worker.settings import WorkerSettings
from shared.cores.quota import read_quota
from shared.cores.topology import read_topology
from shared.engine.engine import Engine
from shared.engine.messages import EngineDied, Event
from shared.engine.runner.pool_memory import MemoryBudget
from shared.engine.runner.profile_run import measure_budget
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.errors import ConfigError, TandemError
from shared.fingerprints import deterministic_fingerprint
from shared.kernels.cpu.multilinear import fastest_sum
from shared.kernels.dtype_timing import faster_dtype
from shared.kernels.kv_dtype import KV_DTYPES
from shared.kernels.registry import choose_kernels
from shared.kv.fleet_key import FleetKey, seal_of
from shared.kv.hashing import ChainRoots
from shared.kv.layout import LAYOUT_VERSION, BlockLayout
from shared.kv.pool import BlockPool
from shared.kv.seal import Purpose, Seal
from shared.kv.transfer import KVTransfer
from shared.kv.ucx import UcxTransfer
from shared.model.arithmetic import arithmetic_digest
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.expert_placement import Placement
from shared.model.rank_decoder import RankDecoder
from shared.model.texts_digest import texts_digest
from shared.model.tokenizer import Tokenizer
from shared.model.weights import fingerprint
from shared.structure.compiler import StructureCompiler

AUTO_POOL_SEQUENCES = 32
"""With num_kv_blocks = 0, the pool is sized for this many sequences of full length …"""
AUTO_POOL_MEMORY_SHARE = 0.1
"""… but takes at most this share of the memory that is free at the start."""

AUTO_SWAP_BYTES = 256 << 20
"""With host_swap_bytes = -1, for a pool that lies in host memory itself …"""
AUTO_GPU_SWAP_BYTES = 8 << 30
"""… and at most for one on a GPU: it is pinned, and pinning takes time …"""
AUTO_GPU_SWAP_SHARE = 1 / 8
"""… nor more than this share of the host memory that is free at the start."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded checkpoint and the sizes that follow from it."""

    decoder: Decoder
    layout: BlockLayout
    roots: ChainRoots
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    name: str
    texts_digest: str
    """As `shared.model.texts_digest` of its folder."""

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint in this dtype, in deterministic mode also of the bits computed; workers of one fleet have
        the same one."""
        return self.roots.model_fingerprint


class EngineHost:
    """Engine and transfer plane of one process. `start()` returns when both work; `close()` twice is fine."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Nothing is loaded before `start()`."""
        self.settings = settings
        self.incarnation = secrets.randbits(64)
        self.fleet_key = FleetKey.of(settings.fleet_key.get_secret_value(), settings.block_encryption)
        """None where the transfer plane is open to all."""
        self.transfer: KVTransfer = UcxTransfer(fleet_key=self.fleet_key, bind_gpu=_gpu_binding(settings))
        self.engine: Engine
        self.model: LoadedModel
        self.structures: StructureCompiler
        """For structured output; as `model`, there once it is started."""
        self._group: RankGroup | None = None
        self._balance: ExpertBalance | None = None

    async def start(self, on_event: Callable[[Event], None], on_progress: Callable[[float, str], None]) -> None:
        """Loads the model and starts the engine thread and the transfer plane.

        `on_event` gets the engine's events on the event loop, in order; `on_progress` gets (fraction, what).
        Raises ModelLoadError, ConfigError; then it is closed, and no rank of its group runs on.
        """
        try:
            await self._start(on_event, on_progress)
        except BaseException:
            await self.close()
            raise

    async def _start(self, on_event: Callable[[Event], None], on_progress: Callable[[float, str], None]) -> None:
        loop = asyncio.get_running_loop()

        def progress(loaded: int, total: int) -> None:
            loop.call_soon_threadsafe(on_progress, loaded / max(1, total), "loading weights")

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(on_event, event)

        if self.settings.degrees.num_ranks > 1:
            dtype, kernels = await asyncio.to_thread(_check_group, self.settings)
            if self.settings.expert_load:
                self._balance = await asyncio.to_thread(_load_balance, self.settings)
            # On this thread: the kernel ends the followers with the thread that started them.
            placement = () if self._balance is None else self._balance.placement
            self._group = _start_group(self.settings, dtype, kernels, placement)
            take_share(self.settings.name, self._group.own_share)
        else:
            take_cores(self.settings)
        self.model = await asyncio.to_thread(
            load_model, self.settings, progress, self._group, lambda error: emit(EngineDied(error))
        )
        if self.fleet_key is not None:
            self.fleet_key.use(await asyncio.to_thread(fastest_sum))
        await self.transfer.start()
        pool = BlockPool(self.model.num_blocks, self.model.layout.block_size)
        checkpoint = self.model.decoder.config
        config = scheduler_config(self.settings, self.model.num_host_blocks)
        self.structures = StructureCompiler(
            lambda: Tokenizer.load(self.settings.model), checkpoint.eos_token_ids, checkpoint.vocab_size
        )
        runner = await asyncio.to_thread(_start_runner, self.settings, self.model, self.structures, self._group)
        self.engine = Engine(Scheduler(pool, config), runner, emit)
        self.engine.start()
        if self._balance is not None and isinstance(self.model.decoder, RankDecoder):
            self._balance.measure(self.model.decoder.expert_counts)

    def seal(self, purpose: Purpose, ticket: int) -> Seal | None:
        """Of a ticket; None in a fleet without a key."""
        return seal_of(self.fleet_key, purpose, ticket, self.model.layout.block_bytes)

    async def close(self) -> None:
        """Stops the engine, keeps what is measured, then stops the group's other ranks and the transfer plane."""
        if hasattr(self, "engine"):
            await asyncio.to_thread(self.engine.close)
        if self._balance is not None:
            await asyncio.to_thread(self._balance.keep)
        if self._group is not None:
            await asyncio.to_thread(self._group.close)
        await self.transfer.close()


def load_model(
    settings: WorkerSettings,
    on_progress: Callable[[int, int], None],
    group: RankGroup | None = None,
    on_lost: Callable[[TandemError], None] = lambda _: None,
) -> LoadedModel:
    """Reads the folder, or as a group's leader the first rank's slice of it, and sizes the pool. Blocking.

    `on_lost` as in `RankGroup.meet`. Raises ModelLoadError, ConfigError, RankLost.
    """
    config = ModelConfig.load(settings.model)
    check_device(settings.device)
    backend = choose_backend(settings)
    dtype = choose_dtype(settings.dtype, config, settings.device, backend) if group is None else group.dtype
    layout = config.block_layout(settings.block_size, _name(choose_kv_dtype(settings.kv_dtype, dtype)))
    if group is None:
        decoder = Decoder.load(
            settings.model,
            dtype,
            settings.device,
            on_progress,
            backend,
            deterministic=settings.deterministic,
        )
    else:
        links = group.meet(on_lost)
        decoder = RankDecoder.load_rank(
            settings.model, dtype, group.kernels, group.degrees, links, on_progress, group.placement
        )
    identity = fingerprint(settings.model, _name(dtype))
    if settings.deterministic:
        identity = deterministic_fingerprint(identity, arithmetic_digest(decoder, layout))
    wanted_len = settings.max_model_len or config.max_position_embeddings
    if group is not None:
        group.wait_loaded()
    num_blocks = _choose_num_blocks(settings, decoder, layout, wanted_len)
    return LoadedModel(
        decoder=decoder,
        layout=layout,
        roots=_chain_roots(identity, layout, config),
        num_blocks=num_blocks,
        num_host_blocks=choose_swap_bytes(settings, num_blocks * layout.block_bytes, psutil.virtual_memory().available)
        // layout.block_bytes,
        # One block stays aside, so that a sequence of full length can also grow by its next token.
        max_model_len=min(wanted_len, (num_blocks - 1) * layout.block_size),
        name=Path(settings.model).resolve().name,
        texts_digest=texts_digest(settings.model),
    )


def _check_group(settings: WorkerSettings) -> tuple[torch.dtype, str]:
    """The dtype and the kernels of all ranks: `auto` is decided once, as its timings may differ. Blocking. Raises
    ConfigError where the ranks cannot share the model."""
    config, backend = ModelConfig.load(settings.model), choose_backend(settings)
    settings.degrees.check(config)
    dtype = choose_dtype(settings.dtype, config, settings.device, backend)
    if dtype == torch.float16:
        raise ConfigError("tp and pp above 1 compute in float32 and bfloat16, not in float16", field="dtype")
    return dtype, choose_kernels(settings.device, dtype, backend).name


def _load_balance(settings: WorkerSettings) -> ExpertBalance:
    return ExpertBalance(settings, ModelConfig.load(settings.model))


def _start_group(settings: WorkerSettings, dtype: torch.dtype, kernels: str, placement: Placement) -> RankGroup:
    allowed = frozenset(os.sched_getaffinity(0))
    topology = read_topology()
    share = choose_cores(settings, topology, allowed, read_quota())
    cpus = tuple(cpu for cpu in share.cpus if cpu in allowed)  # as the kernel reads a process's mask
    if share.cpus and not cpus:
        raise not_cores(settings, "none of them is this process's")
    logs = settings.log_format, settings.log_level
    own = replace(share, cpus=cpus)
    return RankGroup(
        settings.name, str(settings.model), settings.degrees, dtype, kernels, own, topology, logs, placement
    )


def check_device(device: str) -> None:
    """Raises ConfigError where the device is not on this machine."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but torch sees no CUDA device on this machine", field="device")
    if place.index is not None and place.index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device is {device}, but torch sees {count} CUDA devices on this machine, numbered from 0",
            field="device",
            limit=count - 1,
        )


def _chain_roots(model_fingerprint: str, layout: BlockLayout, config: ModelConfig) -> ChainRoots:
    trained_len = config.rope.original_max_position_embeddings if config.rope.type == "dynamic" else 0
    return ChainRoots(model_fingerprint, layout.format.name, LAYOUT_VERSION, trained_len)


def choose_swap_bytes(settings: WorkerSettings, pool_bytes: int, free_bytes: int) -> int:
    """Host memory for preempted sequences, as the setting says; `free_bytes` is of host memory."""
    if settings.host_swap_bytes >= 0:
        return settings.host_swap_bytes
    if not settings.is_on_gpu:
        return AUTO_SWAP_BYTES
    return min(pool_bytes, AUTO_GPU_SWAP_BYTES, int(free_bytes * AUTO_GPU_SWAP_SHARE))


def scheduler_config(settings: WorkerSettings, num_host_blocks: int) -> SchedulerConfig:
    """The scheduler's part of the settings."""
    return SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        output_quantile=settings.output_length_quantile,
        num_host_blocks=num_host_blocks,
        tpot_target_s=settings.tpot_target_ms / 1e3,
        max_overtaken_s=settings.max_overtaken_ms / 1e3,
        max_unsent_share=settings.max_unsent_share,
    )


def choose_backend(settings: WorkerSettings) -> str:
    """The backend's name for the registry, with the instruction set where one is wanted."""
    if settings.cpu_isa == "auto" or settings.device != "cpu" or settings.kernels not in ("auto", "cpu"):
        return settings.kernels
    return "torch" if settings.cpu_isa == "torch" else f"cpu:{settings.cpu_isa}"


def choose_dtype(wanted: str, config: ModelConfig, device: str = "cpu", backend: str = "auto") -> torch.dtype:
    """`auto` is the checkpoint's dtype; on a CPU the faster one for bf16 checkpoints, fp32 for others. Blocking."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device != "cpu":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(config.dtype), torch.float32)
    return faster_dtype(backend) if config.dtype == "bfloat16" else torch.float32


def choose_kv_dtype(wanted: str, compute: torch.dtype) -> torch.dtype:
    """`auto` is the dtype of the computation. Raises ConfigError where no kernels read the one in the other."""
    kv_dtype = compute if wanted == "auto" else DTYPES[wanted]
    if kv_dtype not in KV_DTYPES[compute]:
        allowed = ", ".join(name for name, dtype in DTYPES.items() if dtype in KV_DTYPES[compute])
        raise ConfigError(
            f"kv_dtype {wanted} is not supported beside computation in {_name(compute)}, only auto or {allowed}",
            field="kv_dtype",
            limit=allowed,
        )
    return kv_dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _choose_num_blocks(settings: WorkerSettings, decoder: Decoder, layout: BlockLayout, max_len: int) -> int:
    """Raises ConfigError where the pool does not fit; it says how many blocks do."""
    if settings.is_on_gpu:
        budget = measure_budget(
            decoder, layout, settings.max_num_seqs, settings.max_num_batched_tokens, max_len, settings.gpu_memory
        )
        return budget.choose(settings.num_kv_blocks, sys.maxsize, layout)
    share = 1.0 if settings.num_kv_blocks else AUTO_POOL_MEMORY_SHARE
    budget = MemoryBudget(psutil.virtual_memory().available, step_bytes=0, share=share)
    return budget.choose(settings.num_kv_blocks, AUTO_POOL_SEQUENCES * -(-max_len // layout.block_size) + 1, layout)


def _gpu_binding(settings: WorkerSettings) -> Callable[[], None] | None:
    """What a thread that moves the GPU's blocks must call first; None where none does."""
    if not settings.gpu_direct:
        return None
    return partial(torch.cuda.set_device, torch.device(settings.device).index or 0)


def _start_runner(
    settings: WorkerSettings, model: LoadedModel, structures: StructureCompiler, group: RankGroup | None = None
) -> Runner:
    """The runner, ready for its first step. Blocking. Raises ConfigError, RankLost, and as `self_test`."""
    config = RunnerConfig(
        settings.max_num_seqs,
        model.max_model_len,
        settings.max_num_batched_tokens,
        piecewise_tokens=settings.piecewise_tokens,
        device_transfer=settings.gpu_direct,
        num_host_blocks=model.num_host_blocks,
        debug_numerics=settings.debug_numerics,
    )
    structures.start(model.decoder.config.vocab_size)
    pool = None if group is None else group.share_pool(model.layout, model.num_blocks, model.fingerprint)
    announce = None if group is None else group.announcer
    runner = Runner(
        model.decoder, model.layout, model.num_blocks, config, structures=structures, pool=pool, announce=announce
    )
    with torch.inference_mode():
        runner.start()
    self_test(runner, model.layout.block_size, model.decoder.config.vocab_size)
    return runner
