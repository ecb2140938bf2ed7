"""A checkpoint as a worker has it: read, checked against the settings, and a pool sized for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from services.worker.group.leader import RankGroup
from services.worker.machine.choices import (
    check_device,
    choose_backend,
    choose_dtype,
    choose_kv_formats,
    choose_swap_bytes,
)
from services.worker.machine.pool_size import PoolNeed, most_blocks, pool_need
from services.worker.settings import WorkerSettings
from shared.engine.group.own_slices import SliceForm
from shared.engine.runner.draft import check_draft, draft_layout, draft_steps, load_draft
from shared.engine.runner.profile_run import measure_budget
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sampling_params import MOST_GUESSES
from shared.errors import ConfigError, TandemError
from shared.fingerprints import deterministic_fingerprint, headed_fingerprint
from shared.identity import BOTH, Roles, WorkerRole
from shared.kernels.pool_view import dtype_name
from shared.kv.hashing import ChainRoots
from shared.kv.layout import LAYOUT_VERSION, BlockLayout
from shared.kv.transfer import TRAILER_INDEX
from shared.model.arithmetic import arithmetic_digest
from shared.model.config.model_config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.families.eagle3 import read_eagle
from shared.model.families.registry import load_config
from shared.model.ranks.block_slices import block_slices
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.text.texts_digest import texts_digest
from shared.model.weights.head_checkpoint import missing_head
from shared.model.weights.loader import fingerprint

logger = logging.getLogger(__name__)


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
    """Kind that plain weights were rounded to at load; see `Decoder.quantization`."""
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
    """Whether its blocks have the KV of a head."""
    head_identity: str = ""
    """Fingerprint of a head that has a folder of its own."""

    @property
    def decoder(self) -> Decoder:
        """The model's decoder; a worker that sleeps has none."""
        assert self.loaded is not None, "the worker sleeps"
        return self.loaded

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint in this dtype, in deterministic mode also of the bits computed; workers of
        one fleet have the same one."""
        return self.roots.model_fingerprint


def load_model(
    settings: WorkerSettings,
    on_progress: Callable[[int, int], None],
    group: RankGroup | None = None,
    on_lost: Callable[[TandemError], None] = lambda _: None,
    roles: Roles = BOTH,
    *,
    is_again: bool = False,
) -> LoadedModel:
    """Reads the folder, or as a group's leader the first rank's slice of it, and sizes the pool. Blocking.

    `on_lost` as in `RankGroup.meet`. `is_again`: the process has had this very number of blocks before. Raises
    ModelLoadError, ConfigError, RankLost.
    """
    config = load_config(settings.model)
    check_device(settings.devices[0])
    backend = choose_backend(settings)
    head_folder = settings.head_folder
    served = config if head_folder is None else replace(config, head=read_eagle(head_folder, config))
    if settings.draft and head_folder is None:
        check_draft(Path(settings.draft), config.vocab_size)
    dtype = choose_dtype(settings.dtype, config, settings.devices[0], backend) if group is None else group.dtype
    kv_dtype, source, sent = choose_kv_formats(
        settings, dtype, has_latents=config.latent is not None, has_states=config.delta is not None, roles=roles
    )
    has_kv_groups, is_guessing = settings.degrees.has_kv_groups, wants_head(settings, config, roles)
    layout = served.block_layout(settings.block_size, kv_dtype, grouped=has_kv_groups, has_head=is_guessing)
    layout = replace(layout, format=replace(layout.format, source=source, sent=sent))
    decoder = _load_decoder(settings, dtype, backend, group, on_progress, on_lost, has_head=is_guessing)
    head_identity = "" if head_folder is None else fingerprint(head_folder, dtype_name(dtype))
    identity = _identity(settings, dtype, decoder, layout, head_identity if is_guessing else None)
    wanted_len = settings.max_model_len or config.max_position_embeddings
    if group is not None:
        group.wait_loaded()
    held_bytes = _held_bytes(layout, config, group)
    has_draft = settings.draft and head_folder is None and settings.may_guess(has_states=config.delta is not None)
    draft = _read_draft(settings, config.vocab_size, backend) if has_draft else None
    need = _pool_need(settings, layout, wanted_len, held_bytes, draft)
    num_blocks = _choose_num_blocks(settings, decoder, layout, need, group, is_again=is_again)
    return LoadedModel(
        loaded=decoder,
        config=config,
        kernels=decoder.kernels.name,
        dtype=decoder.dtype,
        quantization=decoder.quantization,
        weight_bytes=decoder.projection_bytes,
        layout=layout,
        roots=ChainRoots(identity, layout.name, LAYOUT_VERSION, config.prefix_length),
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
        head_identity=head_identity,
    )


def _load_decoder(
    settings: WorkerSettings,
    dtype: torch.dtype,
    backend: str,
    group: RankGroup | None,
    on_progress: Callable[[int, int], None],
    on_lost: Callable[[TandemError], None],
    *,
    has_head: bool,
) -> Decoder:
    """The whole model, or the first rank's slice of it, which reads while its followers read theirs."""
    if group is None:
        return Decoder.load(
            settings.model,
            dtype,
            settings.devices[0],
            on_progress,
            backend,
            deterministic=settings.deterministic,
            quantization=settings.quantization,
            has_head=has_head,
            head_folder=settings.head_folder,
        )
    links = group.meet(on_lost)
    return RankDecoder.load_rank(
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


def _identity(
    settings: WorkerSettings, dtype: torch.dtype, decoder: Decoder, layout: BlockLayout, head: str | None
) -> str:
    """The fingerprint of what computes the KV; see `LoadedModel.fingerprint`. `head`: of a head that guesses, empty
    where the model's folder has it; None without one."""
    identity = fingerprint(settings.model, dtype_name(dtype), settings.quantization)
    if head is not None:
        identity = headed_fingerprint(identity, head)
    if settings.deterministic:
        identity = deterministic_fingerprint(identity, arithmetic_digest(decoder, layout))
    return identity


def wants_head(settings: WorkerSettings, config: ModelConfig, roles: Roles) -> bool:
    """Whether a head is loaded, the checkpoint's or that of the draft's folder, as all workers of a fleet must have it:
    a layer of their blocks is its. Raises ConfigError where the settings need one that is not served. By no other
    setting than `heads`: what `auto` found would differ between workers of one fleet."""
    if settings.speculation != "heads":
        return False
    problem = ""
    if settings.degrees.num_ranks > 1:
        problem = f"worker {settings.name} is {settings.degrees.num_ranks} processes: a head takes 1"
    elif WorkerRole.DECODE in roles and not settings.may_guess(has_states=config.delta is not None):
        problem = f"a worker that decodes on {settings.device} guesses nothing for models whose layers keep states"
    elif settings.head_folder is None:
        problem = missing_head(Path(settings.model), config)
    if problem:
        raise ConfigError(f"speculation is heads, but {problem}", field="speculation", value="heads")
    return True


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
        most_guesses=0 if settings.speculation == "off" else MOST_GUESSES,
        debug_numerics=settings.debug_numerics,
    )


def _read_draft(settings: WorkerSettings, vocab_size: int, backend: str) -> tuple[Decoder, BlockLayout]:
    """The draft model and the layout of its KV; see `load_draft`."""
    folder = Path(settings.draft)
    device = settings.devices[0]
    dtype = choose_dtype(settings.dtype, load_config(folder), device, backend)
    decoder = load_draft(folder, dtype, vocab_size, backend, device)
    return decoder, draft_layout(decoder, settings.block_size)


def _held_bytes(layout: BlockLayout, config: ModelConfig, group: RankGroup | None) -> int:
    """Bytes of a block on the host that holds most of it: the whole block, or where ranks have pools of their own the
    slices of that host's ranks."""
    if group is None or not group.has_own_pools:
        return layout.block_bytes
    return group.held_bytes(SliceForm(layout, block_slices(config, group.degrees)))


def _pool_need(
    settings: WorkerSettings,
    layout: BlockLayout,
    max_len: int,
    held_bytes: int,
    draft: tuple[Decoder, BlockLayout] | None,
) -> PoolNeed:
    """What the pool's blocks take, `held_bytes` each, with those of a draft model beside them."""
    if draft is None:
        return pool_need(settings, layout, max_len, held_bytes)
    draft_bytes = -(-draft[1].block_bytes // layout.groups.size)
    need = pool_need(settings, layout, max_len, held_bytes + draft_bytes)
    if not settings.is_on_gpu:
        return need
    return replace(need, draft_bytes=draft_bytes, draft_step_bytes=_draft_step_bytes(settings, *draft, max_len))


def _draft_step_bytes(settings: WorkerSettings, decoder: Decoder, layout: BlockLayout, max_len: int) -> int:
    """What a draft's graphs and its largest step take of a GPU's memory."""
    config = draft_steps(settings.max_num_seqs)
    tokens = config.max_num_batched_tokens
    return measure_budget(decoder, layout, config.max_num_seqs, tokens, max_len, graphs=config).step_bytes


def _choose_num_blocks(
    settings: WorkerSettings,
    decoder: Decoder,
    layout: BlockLayout,
    need: PoolNeed,
    group: RankGroup | None,
    *,
    is_again: bool = False,
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
    if is_again:
        # Graphs may take a segment more than the first time; what the pool's share leaves is for just that.
        budget = replace(budget, share=1.0)
    if group is not None and group.has_own_pools:
        fewest = group.fewest(budget.num_blocks(own))
    return budget.choose(settings.num_kv_blocks, most_blocks(settings, layout, need.max_model_len), own, fewest)
