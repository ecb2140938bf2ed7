"""One engine process: loads the model, owns engine, transfer plane and index publisher."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import secrets
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from services.worker.engine_parts import open_speculator, scheduler_config, start_runner
from services.worker.group.expert_balance import ExpertBalance
from services.worker.group.leader import RankGroup
from services.worker.group.start import check_group, start_group
from services.worker.loaded_model import LoadedModel, load_model
from services.worker.machine.choices import (
    dtype_setting,
)
from services.worker.machine.cores import choose_group_cores, take_cores, take_share
from services.worker.settings import WorkerSettings
from shared import failpoints
from shared.engine.engine import Engine
from shared.engine.messages import EngineDied, Event
from shared.engine.resting_engine import RestingEngine
from shared.engine.runner.runner import Runner
from shared.engine.scheduler.scheduler import Scheduler
from shared.engine.speculation.speculator import GuessCounters
from shared.engine.step_counters import StepCounters
from shared.identity import BOTH, Roles, WorkerRole
from shared.kernels.cpu.multilinear import fastest_sum
from shared.kernels.cpu.packing import fastest_packing
from shared.kernels.lora.step import LoadedAdapter
from shared.kv.fleet_key import FleetKey, seal_of
from shared.kv.packing import PACKED_DTYPES, BlockPacking
from shared.kv.pool import BlockPool
from shared.kv.seal import Purpose, Seal
from shared.kv.transfer import KVTransfer
from shared.kv.ucx import UcxTransfer
from shared.model.families.registry import load_config
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler

logger = logging.getLogger(__name__)


class EngineHost:
    """Engine and transfer plane of one process. `start()` returns when both work; `close()` twice is fine."""

    def __init__(self, settings: WorkerSettings, roles: Roles = BOTH) -> None:
        """Nothing is loaded before `start()`. `roles`: the worker's."""
        self.settings = settings
        self.folder = Path(settings.model)
        """Folder of the weights that it has."""
        self._roles = roles
        self.incarnation = secrets.randbits(64)
        self.fleet_key = FleetKey.of(settings.fleet_key.get_secret_value(), settings.block_encryption)
        """None where the transfer plane is open to all."""
        self.transfer: KVTransfer = UcxTransfer(
            fleet_key=self.fleet_key, bind_gpu=_gpu_binding(settings, roles), needs_gpu=settings.gpu_direct is True
        )
        self.engine: Engine | RestingEngine
        self.model: LoadedModel
        self.guesses: GuessCounters
        """Counters of the engine's guesses; there once it is started, as `model` is."""
        self.packing: BlockPacking | None = None
        """Packing of blocks as hand-offs send them; None where they are only sent as they are."""
        self.structures: StructureCompiler
        """For structured output; as `model`, there once it is started."""
        self._group: RankGroup | None = None
        self._new_group: Callable[[WorkerSettings], RankGroup] | None = None
        """Starts the group that this worker is; None for one process."""
        self._balance: ExpertBalance | None = None
        self._unheard: list[Event] = []  # until `listen`; the engine emits little before its first command
        self._on_event: Callable[[Event], None] = self._unheard.append

    def listen(self, on_event: Callable[[Event], None]) -> None:
        """`on_event` gets the engine's events on the event loop, in order: first those that came before this call."""
        self._on_event = on_event
        unheard, self._unheard = self._unheard, []
        for event in unheard:
            on_event(event)

    def _take(self, event: Event) -> None:
        self._on_event(event)

    async def start(self, on_progress: Callable[[float, str], None]) -> None:
        """Loads the model and starts the engine thread and the transfer plane.

        `on_progress` gets (fraction, what).
        Raises ModelLoadError, ConfigError; then it is closed, and no rank of its group runs on.
        """
        try:
            await self._start(on_progress)
        except BaseException:
            await self.close()
            raise

    async def _start(self, on_progress: Callable[[float, str], None]) -> None:
        if self.settings.degrees.num_ranks > 1:
            dtype, kernels = await asyncio.to_thread(check_group, self.settings)
            if self.settings.expert_load:
                self._balance = await asyncio.to_thread(
                    lambda: ExpertBalance(self.settings, load_config(self.settings.model))
                )
            placement = () if self._balance is None else self._balance.placement
            cores = choose_group_cores(self.settings)  # before this process takes its own share of them
            self._new_group = lambda settings: start_group(settings, dtype, kernels, placement, cores)
            # On this thread: the kernel ends the followers with the thread that started them.
            self._group = self._new_group(self.settings)
            take_share(self.settings.name, self._group.own_share)
        else:
            take_cores(self.settings)
        self.model = await self._load(self.settings, on_progress)
        await self.transfer.start()
        if self.fleet_key is not None and not self.transfer.takes_gpu_memory:  # else the GPU makes the tags
            self.fleet_key.use(await asyncio.to_thread(fastest_sum))
        self.packing = await asyncio.to_thread(self._open_packing)
        checkpoint = self.model.config
        self.structures = StructureCompiler(
            lambda: Tokenizer.load(self.settings.model), checkpoint.eos_token_ids, checkpoint.vocab_size
        )
        self.structures.start(checkpoint.vocab_size)
        await self._start_engine(StepCounters())

    async def _load(
        self, settings: WorkerSettings, on_progress: Callable[[float, str], None], *, is_again: bool = False
    ) -> LoadedModel:
        loop = asyncio.get_running_loop()

        def progress(loaded: int, total: int) -> None:
            loop.call_soon_threadsafe(on_progress, loaded / max(1, total), "loading weights")

        emit = self._emitter()
        return await asyncio.to_thread(
            load_model,
            settings,
            progress,
            self._group,
            lambda error: emit(EngineDied(error)),
            self._roles,
            is_again=is_again,
        )

    def _open_packing(self) -> BlockPacking | None:
        """Blocking. On GPUs there is none: it would read what leaves by device pointer."""
        sent = self.model.layout.handed_off
        if self.settings.block_compression == "off" or self.settings.is_on_gpu or sent.dtype not in PACKED_DTYPES:
            return None
        packer = fastest_packing()
        return BlockPacking(packer, sent.block_bytes, sent.dtype) if packer is not None else None

    def _emitter(self) -> Callable[[Event], None]:
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(self._take, event)

        return emit

    async def _start_engine(self, steps: StepCounters) -> None:
        """Starts an engine over the model; `steps` keep what was counted before."""
        pool = BlockPool(self.model.num_blocks, self.model.layout.block_size)
        is_recomputed = not self.model.layout.format.source
        config = scheduler_config(self.settings, self.model.num_host_blocks, recomputes=is_recomputed)
        device_transfer = self.transfer.takes_gpu_memory and not self.model.layout.format.sent
        logger.info("blocks are sent from %s memory", "the GPU's" if device_transfer else "host")
        runner = await asyncio.to_thread(
            start_runner, self.settings, self.model, self.structures, self._group, device_transfer=device_transfer
        )
        speculator = open_speculator(self.settings, runner, self.structures, self.model.draft, self._roles)
        self.guesses = speculator.counters if speculator is not None else GuessCounters()
        scheduler = Scheduler(pool, config, groups=self.model.layout.groups, speculator=speculator)
        on_thread = runner.prepare_thread if isinstance(runner, Runner) else lambda: None
        self.engine = engine = Engine(scheduler, runner, self._emitter(), steps=steps, on_thread=on_thread)
        engine.start()
        if self._balance is not None and isinstance(self.model.decoder, RankDecoder):
            self._balance.measure(self.model.decoder.expert_counts)

    async def unload(self) -> None:
        """Drops weights and pool. Nothing may have a block of the pool, and commands are dropped until `reload`; a
        no-op while there are none. A group's other ranks end. Adapters rest."""
        if self.model.loaded is None:
            return
        engine = self.engine
        self.engine = RestingEngine(self._emitter(), engine.steps)
        await asyncio.to_thread(engine.close)
        self.engine.steps.waiting = True
        if self._balance is not None:
            await asyncio.to_thread(self._balance.keep)
            self._balance.measure(dict)
        await self._end_group()
        self.model = replace(self.model, loaded=None, draft=None)
        del engine
        await asyncio.to_thread(release_memory)

    async def _end_group(self) -> None:
        """Ends the other ranks; none where there are none."""
        if self._group is not None:
            await asyncio.to_thread(self._group.close)
            self._group = None

    async def reload(self, folder: Path) -> None:
        """Reads weights of the same shapes, and starts the engine over an empty pool of the size before. `unload` comes
        first. Raises ModelLoadError, ConfigError; then there are still none."""
        assert self.model.loaded is None, "unload first"
        settings = self.settings.model_copy(
            update={"model": folder, "num_kv_blocks": self.model.num_blocks, "dtype": dtype_setting(self.model.dtype)}
        )
        before, resting = self.model, self.engine
        try:
            if self._new_group is not None:
                self._group = self._new_group(settings)
            self.model = await self._load(settings, lambda _fraction, _what: None, is_again=True)
            await self._start_engine(resting.steps)
        except BaseException:
            self.model, self.engine = before, resting
            await self._end_group()
            raise
        self.folder = folder

    def read_adapter(self, folder: Path) -> LoadedAdapter:
        """See `ReadAdapter`; in a group every rank reads its part. Raises ModelLoadError, RankLost."""
        if failpoints.armed:
            failpoints.strike(failpoints.ADAPTER_READ)
        settings, decoder = self.settings, self.model.decoder
        limits = {"max_rank": settings.adapter_max_rank, "max_bytes": settings.adapter_bytes}
        if self._group is not None:
            assert isinstance(decoder, RankDecoder)
            return self._group.open_adapters(decoder).read(folder, **limits, keeps_copy=settings.adapter_host_bytes > 0)
        adapter = decoder.read_adapter(folder, **limits)
        packed = decoder.pack_adapter(adapter)
        copy = decoder.host_copy(adapter, packed) if settings.adapter_host_bytes else None
        return LoadedAdapter(adapter.digest, adapter.rank, packed, packed.nbytes, copy)

    def seal(self, purpose: Purpose, ticket: int) -> Seal | None:
        """The seal of a ticket; None in a fleet without a key."""
        layout = self.model.layout.handed_off if purpose is Purpose.HANDOFF else self.model.layout
        return seal_of(self.fleet_key, purpose, ticket, layout.block_bytes)

    async def close(self) -> None:
        """Stops the engine, keeps what is measured, then stops the group's other ranks and the transfer plane."""
        if hasattr(self, "engine"):
            await asyncio.to_thread(self.engine.close)
        if self._balance is not None:
            await asyncio.to_thread(self._balance.keep)
        await self._end_group()
        await self.transfer.close()


def release_memory() -> None:
    """Gives the operating system and the GPU back what nothing refers to any more. Blocking."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        ctypes.CDLL(None).malloc_trim(0)


def let_go(error: BaseException) -> None:
    """Drops what the functions that an error ended had, such as a part of a model. To be called by the function that
    caught it, while it runs: one that waits would be ended too."""
    todo, seen = [error], {id(error)}
    while todo:
        found = todo.pop()
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
        for behind in (found.__cause__, found.__context__):
            if behind is not None and id(behind) not in seen:
                seen.add(id(behind))
                todo.append(behind)


def _gpu_binding(settings: WorkerSettings, roles: Roles) -> Callable[[], None] | None:
    """What a thread that moves the GPU's blocks must call first; None where blocks leave by way of host memory, as
    those do that are converted there."""
    if not settings.sends_from_gpu or (settings.converts_kv and WorkerRole.PREFILL in roles):
        return None
    return partial(torch.cuda.set_device, torch.device(settings.devices[0]).index or 0)
