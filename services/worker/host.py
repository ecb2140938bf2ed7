"""One engine process: loads the model, owns engine, transfer plane and index publisher."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import secrets
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from services.worker.group.expert_balance import ExpertBalance
from services.worker.group.leader import RankGroup
from services.worker.group.start import check_group, leader_runner, start_group
from services.worker.machine.choices import (
    check_device,
    choose_backend,
    choose_dtype,
    choose_kv_formats,
    choose_swap_bytes,
    dtype_name,
    dtype_setting,
)
from services.worker.machine.cores import take_cores, take_share
from services.worker.machine.pool_size import PoolNeed, most_blocks, pool_need
from services.worker.machine.self_test import self_test
from services.worker.settings import GPU_LAST_CHUNK, WorkerSettings
from shared.engine.engine import Engine, StepRunner
from shared.engine.group.own_slices import SliceForm
from shared.engine.messages import EngineDied, Event
from shared.engine.resting_engine import RestingEngine
from shared.engine.runner.draft import check_draft, draft_layout, load_draft, open_draft
from shared.engine.runner.heads import open_heads
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.runner.timed_runner import TimedRunner
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.speculation.drafter import Drafter
from shared.engine.speculation.grammar import GrammarDrafter
from shared.engine.speculation.guessing_model import GuessingModel
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import GuessCounters, Speculator
from shared.engine.step_counters import StepCounters
from shared.errors import ConfigError, ModelLoadError, TandemError
from shared.fingerprints import deterministic_fingerprint
from shared.identity import BOTH, Roles, WorkerRole
from shared.kernels.cpu.multilinear import fastest_sum
from shared.kernels.cpu.packing import fastest_packing
from shared.kernels.lora.step import LoadedAdapter
from shared.kv.fleet_key import FleetKey, seal_of
from shared.kv.hashing import ChainRoots
from shared.kv.layout import LAYOUT_VERSION, BlockLayout
from shared.kv.packing import PACKED_DTYPES, BlockPacking
from shared.kv.pool import BlockPool
from shared.kv.seal import Purpose, Seal
from shared.kv.transfer import TRAILER_INDEX, KVTransfer
from shared.kv.ucx import UcxTransfer
from shared.model.arithmetic import arithmetic_digest
from shared.model.config.model_config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.layers.head import head_prefix
from shared.model.ranks.block_slices import block_slices
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.text.texts_digest import texts_digest
from shared.model.text.tokenizer import Tokenizer
from shared.model.weights.head import has_head
from shared.model.weights.loader import fingerprint
from shared.sizing.measured_steps import measured
from shared.structure.compiler import StructureCompiler

logger = logging.getLogger(__name__)

MAX_UNSENT_SHARE = 0.5
"""A prefill worker starts no prompt for a decode worker that has yet to take blocks of more than this share of the
pool."""
TIMED_ANSWER = " No model has computed this answer."
"""What a timed device says, again and again."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft model, whose pool has room for as many tokens as the model's."""

    decoder: Decoder
    layout: BlockLayout
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded checkpoint and the sizes that follow from it."""

    loaded: Decoder | None
    """None while the worker sleeps."""
    config: ModelConfig
    kernels: str
    """Name of the decoder's."""
    dtype: torch.dtype
    quantization: str
    """As `Decoder.quantization`."""
    weight_bytes: int
    """As `Decoder.projection_bytes`."""
    layout: BlockLayout
    roots: ChainRoots
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    name: str
    texts_digest: str
    """As `shared.model.text.texts_digest` of its folder."""
    draft: LoadedDraft | None = None
    has_head: bool = False
    """Whether its blocks have the KV of the checkpoint's head."""

    @property
    def decoder(self) -> Decoder:
        """Not of a worker that sleeps."""
        assert self.loaded is not None, "the worker sleeps"
        return self.loaded

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint in this dtype, in deterministic mode also of the bits computed; workers of one fleet have
        the same one."""
        return self.roots.model_fingerprint


class EngineHost:
    """Engine and transfer plane of one process. `start()` returns when both work; `close()` twice is fine."""

    def __init__(self, settings: WorkerSettings, roles: Roles = BOTH) -> None:
        """Nothing is loaded before `start()`. `roles`: the worker's."""
        self.settings = settings
        self.folder = Path(settings.model)
        """Of the weights that it has."""
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
        """Of the engine; as `model`, there once it is started."""
        self.packing: BlockPacking | None = None
        """Of blocks as hand-offs send them; None where they are only sent as they are."""
        self.structures: StructureCompiler
        """For structured output; as `model`, there once it is started."""
        self._group: RankGroup | None = None
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
            # On this thread: the kernel ends the followers with the thread that started them.
            placement = () if self._balance is None else self._balance.placement
            self._group = start_group(self.settings, dtype, kernels, placement)
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
        if self._balance is not None and isinstance(self.model.decoder, RankDecoder):
            self._balance.measure(self.model.decoder.expert_counts)

    async def _load(self, settings: WorkerSettings, on_progress: Callable[[float, str], None]) -> LoadedModel:
        loop = asyncio.get_running_loop()

        def progress(loaded: int, total: int) -> None:
            loop.call_soon_threadsafe(on_progress, loaded / max(1, total), "loading weights")

        emit = self._emitter()
        return await asyncio.to_thread(
            load_model, settings, progress, self._group, lambda error: emit(EngineDied(error)), self._roles
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
        """Over the model; `steps` go on."""
        pool = BlockPool(self.model.num_blocks, self.model.layout.block_size)
        is_recomputed = not self.model.layout.format.source
        config = scheduler_config(self.settings, self.model.num_host_blocks, recomputes=is_recomputed)
        device_transfer = self.transfer.takes_gpu_memory and not self.model.layout.format.sent
        logger.info("blocks are sent from %s memory", "the GPU's" if device_transfer else "host")
        runner = await asyncio.to_thread(
            _start_runner, self.settings, self.model, self.structures, self._group, device_transfer=device_transfer
        )
        speculator = open_speculator(self.settings, runner, self.structures, self.model.draft, self._roles)
        self.guesses = speculator.counters if speculator is not None else GuessCounters()
        scheduler = Scheduler(pool, config, groups=self.model.layout.groups, speculator=speculator)
        self.engine = engine = Engine(scheduler, runner, self._emitter(), steps=steps)
        engine.start()

    async def unload(self) -> None:
        """Drops weights and pool. Nothing may have a block of the pool, and commands are dropped until `reload`; a
        no-op while there are none. Only of one process, without adapters."""
        if self.model.loaded is None:
            return
        engine = self.engine
        self.engine = RestingEngine(self._emitter(), engine.steps)
        await asyncio.to_thread(engine.close)
        self.engine.steps.waiting = True
        self.model = replace(self.model, loaded=None, draft=None)
        del engine
        await asyncio.to_thread(release_memory)

    async def reload(self, folder: Path) -> None:
        """Reads weights of the same shapes, and starts the engine over an empty pool of the size before. `unload` comes
        first. Raises ModelLoadError, ConfigError; then there are still none."""
        assert self.model.loaded is None, "unload first"
        settings = self.settings.model_copy(
            update={"model": folder, "num_kv_blocks": self.model.num_blocks, "dtype": dtype_setting(self.model.dtype)}
        )
        before, resting = self.model, self.engine
        try:
            self.model = await self._load(settings, lambda _fraction, _what: None)
            if self.model.has_head != before.has_head:
                raise ModelLoadError(
                    f"{folder} has {int(self.model.has_head)} heads, the model before {int(before.has_head)}: "
                    "its blocks have another size",
                    field="folder",
                )
            await self._start_engine(resting.steps)
        except BaseException:
            self.model, self.engine = before, resting
            raise
        self.folder = folder

    def read_adapter(self, folder: Path) -> LoadedAdapter:
        """See `ReadAdapter`; in a group every rank reads its part. Raises ModelLoadError, RankLost."""
        settings, decoder = self.settings, self.model.decoder
        limits = {"max_rank": settings.adapter_max_rank, "max_bytes": settings.adapter_bytes}
        if self._group is not None:
            assert isinstance(decoder, RankDecoder)
            return self._group.open_adapters(decoder).read(folder, **limits)
        adapter = decoder.read_adapter(folder, **limits)
        packed = decoder.pack_adapter(adapter)
        return LoadedAdapter(adapter.digest, adapter.rank, packed, packed.nbytes)

    def seal(self, purpose: Purpose, ticket: int) -> Seal | None:
        """Of a ticket; None in a fleet without a key."""
        layout = self.model.layout.handed_off if purpose is Purpose.HANDOFF else self.model.layout
        return seal_of(self.fleet_key, purpose, ticket, layout.block_bytes)

    async def close(self) -> None:
        """Stops the engine, keeps what is measured, then stops the group's other ranks and the transfer plane."""
        if hasattr(self, "engine"):
            await asyncio.to_thread(self.engine.close)
        if self._balance is not None:
            await asyncio.to_thread(self._balance.keep)
        if self._group is not None:
            await asyncio.to_thread(self._group.close)
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


def load_model(
    settings: WorkerSettings,
    on_progress: Callable[[int, int], None],
    group: RankGroup | None = None,
    on_lost: Callable[[TandemError], None] = lambda _: None,
    roles: Roles = BOTH,
) -> LoadedModel:
    """Reads the folder, or as a group's leader the first rank's slice of it, and sizes the pool. Blocking.

    `on_lost` as in `RankGroup.meet`. Raises ModelLoadError, ConfigError, RankLost.
    """
    config = load_config(settings.model)
    check_device(settings.devices[0])
    _check_states(settings, config)
    backend = choose_backend(settings)
    if settings.draft:
        check_draft(Path(settings.draft), config.vocab_size)
    dtype = choose_dtype(settings.dtype, config, settings.devices[0], backend) if group is None else group.dtype
    kv_dtype, source, sent = choose_kv_formats(
        settings, dtype, has_latents=config.latent is not None, has_states=config.delta is not None, roles=roles
    )
    has_kv_groups, is_guessing = settings.degrees.has_kv_groups, wants_head(settings, config, roles)
    layout = config.block_layout(settings.block_size, kv_dtype, grouped=has_kv_groups, has_head=is_guessing)
    layout = replace(layout, format=replace(layout.format, source=source, sent=sent))
    if group is None:
        decoder = Decoder.load(
            settings.model,
            dtype,
            settings.devices[0],
            on_progress,
            backend,
            deterministic=settings.deterministic,
            quantization=settings.quantization,
            has_head=is_guessing,
        )
    else:
        links = group.meet(on_lost)
        decoder = RankDecoder.load_rank(
            settings.model,
            dtype,
            group.kernels,
            group.degrees,
            links,
            on_progress,
            group.placement,
            settings.devices[0],
            settings.quantization,
        )
    identity = fingerprint(settings.model, dtype_name(dtype), settings.quantization)
    if settings.deterministic:
        identity = deterministic_fingerprint(identity, arithmetic_digest(decoder, layout))
    wanted_len = settings.max_model_len or config.max_position_embeddings
    if group is not None:
        group.wait_loaded()
    held_bytes = layout.block_bytes
    if group is not None and group.has_own_pools:
        held_bytes = group.held_bytes(SliceForm(layout, block_slices(config, group.degrees)))
    draft = _read_draft(settings, config.vocab_size, backend) if settings.draft else None
    draft_bytes = -(-draft[1].block_bytes // layout.groups.size) if draft is not None else 0
    need = pool_need(settings, layout, wanted_len, held_bytes + draft_bytes)
    num_blocks = _choose_num_blocks(settings, decoder, layout, need, group)
    return LoadedModel(
        loaded=decoder,
        config=config,
        kernels=decoder.kernels.name,
        dtype=decoder.dtype,
        quantization=decoder.quantization,
        weight_bytes=decoder.projection_bytes,
        layout=layout,
        roots=_chain_roots(identity, layout, config, has_head=is_guessing),
        num_blocks=num_blocks,
        num_host_blocks=choose_swap_bytes(settings, num_blocks * held_bytes, psutil.virtual_memory().available)
        // held_bytes,
        # One block of each group stays aside, so that a sequence of full length can also grow by its next token.
        max_model_len=min(
            wanted_len,
            layout.groups.max_tokens(num_blocks - layout.groups.size, settings.max_num_batched_tokens),
            TRAILER_INDEX // layout.groups.size * layout.block_size,  # blocks that a hand-off can number
        ),
        name=Path(settings.model).resolve().name,
        texts_digest=texts_digest(settings.model),
        draft=None if draft is None else LoadedDraft(*draft, num_blocks // layout.groups.size),
        has_head=is_guessing,
    )


def _check_states(settings: WorkerSettings, config: ModelConfig) -> None:
    """Raises ConfigError for a setting that is not served where layers have states."""
    if config.delta is None:
        return
    if settings.speculation != "off":
        raise ConfigError(
            f"speculation is {settings.speculation}, and {config.architecture} has layers with states, from which a "
            "wrong guess cannot be taken back: off is served",
            field="speculation",
            value=settings.speculation,
        )
    if settings.has_adapters:
        raise ConfigError(
            f"adapters of {config.architecture}, whose layers have states, are not supported", field="adapters"
        )


def wants_head(settings: WorkerSettings, config: ModelConfig, roles: Roles) -> bool:
    """Whether the checkpoint's head is loaded, as all workers of a fleet must have it: a layer of their blocks is its.
    Raises ConfigError where the settings need one that is not served."""
    if settings.speculation not in ("heads", "auto"):
        return False
    problem = ""
    if settings.degrees.num_ranks > 1:
        problem = f"worker {settings.name} is {settings.degrees.num_ranks} processes: a head takes 1"
    elif settings.is_on_gpu and (settings.speculation == "auto" or WorkerRole.DECODE in roles):
        problem = f"a worker that decodes on {settings.device} guesses nothing: heads need its CPU"
    elif not has_head(Path(settings.model), config):
        missing = "num_nextn_predict_layers" if config.head_layer is None else f"tensor {head_prefix(config)}*"
        problem = f"{settings.model} has no head: no {missing}"
    if problem and settings.speculation == "heads":
        raise ConfigError(f"speculation is heads, but {problem}", field="speculation", value="heads")
    if not problem and settings.draft:
        raise ConfigError(
            f"draft is {settings.draft}, but {settings.model} has a head, which guesses in its place: "
            "take one of them, speculation heads or a checkpoint without",
            field="draft",
            value=settings.draft,
        )
    return not problem


def _chain_roots(
    model_fingerprint: str, layout: BlockLayout, config: ModelConfig, *, has_head: bool = False
) -> ChainRoots:
    name = f"{layout.name}-head" if has_head else layout.name
    return ChainRoots(model_fingerprint, name, LAYOUT_VERSION, config.prefix_length)


def scheduler_config(settings: WorkerSettings, num_host_blocks: int, *, recomputes: bool = True) -> SchedulerConfig:
    """The scheduler's part of the settings."""
    return SchedulerConfig(
        recomputes=recomputes,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        output_quantile=settings.output_length_quantile,
        num_host_blocks=num_host_blocks,
        tpot_target_s=max(0.0, settings.tpot_target_ms) / 1e3,
        itl_target_s=settings.itl_target_ms / 1e3,
        max_overtaken_s=settings.max_overtaken_ms / 1e3,
        max_unsent_share=MAX_UNSENT_SHARE,
        max_last_chunk=GPU_LAST_CHUNK if settings.is_on_gpu else 0,
    )


def runner_config(
    settings: WorkerSettings, max_model_len: int, *, num_host_blocks: int = 0, device_transfer: bool = False
) -> RunnerConfig:
    """The runner's part of the settings."""
    return RunnerConfig(
        settings.max_num_seqs,
        max_model_len,
        settings.max_num_batched_tokens,
        piecewise_tokens=None if settings.piecewise_tokens < 0 else settings.piecewise_tokens,
        device_transfer=device_transfer,
        num_host_blocks=num_host_blocks,
        adapter_slots=settings.adapter_slots if settings.has_adapters else 0,
        adapter_max_rank=settings.adapter_max_rank,
        debug_numerics=settings.debug_numerics,
    )


def _read_draft(settings: WorkerSettings, vocab_size: int, backend: str) -> tuple[Decoder, BlockLayout]:
    """The draft model and the layout of its KV; see `load_draft`."""
    folder = Path(settings.draft)
    dtype = choose_dtype(settings.dtype, load_config(folder), backend=backend)
    decoder = load_draft(folder, dtype, vocab_size, backend)
    return decoder, draft_layout(decoder, settings.block_size)


def open_speculator(
    settings: WorkerSettings,
    runner: StepRunner,
    structures: StructureCompiler,
    draft: LoadedDraft | None = None,
    roles: Roles = BOTH,
) -> Speculator | None:
    """What guesses, as the settings say; None where nothing does. On a device that is given its next step while one
    runs, nothing is guessed: what a guess follows is not known yet. Raises ConfigError where the draft's pool does not
    fit."""
    if settings.speculation == "off":
        return None
    if settings.is_on_gpu or runner.is_async:
        logger.warning("speculation %s guesses nothing on device %s", settings.speculation, settings.device)
        return None
    drafters: list[Drafter] = [] if settings.speculation == "heads" else [NgramDrafter()]
    if settings.speculation == "auto":
        drafters.append(GrammarDrafter(structures.prepare))
    model: GuessingModel | None = None
    if isinstance(runner, Runner) and runner.heads is not None and WorkerRole.DECODE in roles:
        model = open_heads(runner.heads)
        logger.info("the checkpoint's head guesses")
    if draft is not None:
        model = open_draft(draft.decoder, draft.layout, draft.num_blocks, settings.max_num_seqs)
        logger.info(
            "draft model %s guesses: %d blocks of %d bytes", settings.draft, draft.num_blocks, draft.layout.block_bytes
        )
    return Speculator(drafters, model=model, processor_clock=time.thread_time)


def _choose_num_blocks(
    settings: WorkerSettings, decoder: Decoder, layout: BlockLayout, need: PoolNeed, group: RankGroup | None
) -> int:
    """Raises ConfigError where the pool does not fit; it says how many blocks do. Raises RankLost."""
    own, fewest = layout, None
    if group is not None and group.has_own_pools:
        assert isinstance(decoder, RankDecoder)
        group.ask_for_room(need)
        own = decoder.own_layout(layout.block_size, layout.dtype)
    # Ranks of a group capture nothing.
    graphs = runner_config(settings, need.max_model_len) if group is None else None
    budget = need.budget(decoder, own, graphs=graphs)
    if group is not None and group.has_own_pools:
        fewest = group.fewest(budget.num_blocks(own))
    return budget.choose(settings.num_kv_blocks, most_blocks(settings, layout, need.max_model_len), own, fewest)


def _gpu_binding(settings: WorkerSettings, roles: Roles) -> Callable[[], None] | None:
    """What a thread that moves the GPU's blocks must call first; None where blocks leave by way of host memory, as
    those do that are converted there."""
    if not settings.sends_from_gpu or (settings.converts_kv and WorkerRole.PREFILL in roles):
        return None
    return partial(torch.cuda.set_device, torch.device(settings.devices[0]).index or 0)


def _start_runner(
    settings: WorkerSettings,
    model: LoadedModel,
    structures: StructureCompiler,
    group: RankGroup | None = None,
    *,
    device_transfer: bool,
) -> StepRunner:
    """The runner, ready for its first step. Blocking. Raises ConfigError, RankLost, and as `self_test`."""
    config = runner_config(
        settings, model.max_model_len, num_host_blocks=model.num_host_blocks, device_transfer=device_transfer
    )
    if group is None:
        runner = Runner(model.decoder, model.layout, model.num_blocks, config, structures=structures)
    else:
        assert isinstance(model.decoder, RankDecoder)
        runner = leader_runner(
            group, model.decoder, model.layout, model.num_blocks, config, structures, model.fingerprint
        )
    with torch.inference_mode():
        runner.start()
    self_test(runner, model.layout.groups, model.decoder.config.vocab_size)
    if settings.step_times is None:
        return runner
    return TimedRunner(
        runner, measured(settings.step_times, "device"), Tokenizer.load(settings.model).encode(TIMED_ANSWER)
    )
