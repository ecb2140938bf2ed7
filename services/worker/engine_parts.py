"""The parts of a worker's engine, as its settings say."""

from __future__ import annotations

import logging
import time

import torch

from services.worker.group.leader import RankGroup
from services.worker.group.start import leader_runner
from services.worker.loaded_model import LoadedDraft, LoadedModel, runner_config
from services.worker.machine.self_test import self_test
from services.worker.settings import WorkerSettings
from shared.engine.engine import StepRunner
from shared.engine.runner.draft import open_draft
from shared.engine.runner.heads import open_heads
from shared.engine.runner.runner import Runner
from shared.engine.runner.timed_runner import TimedRunner
from shared.engine.scheduler.config import MAX_UNSENT_SHARE, SchedulerConfig
from shared.engine.speculation.drafter import Drafter
from shared.engine.speculation.grammar import GrammarDrafter
from shared.engine.speculation.guessing_model import GuessingModel
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.identity import BOTH, Roles, WorkerRole
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.text.tokenizer import Tokenizer
from shared.sizing.measured_steps import measured
from shared.structure.compiler import StructureCompiler

logger = logging.getLogger(__name__)

TIMED_ANSWER = " No model has computed this answer."
"""The text that a timed device repeats as every answer."""

GPU_LAST_CHUNK = 512
"""Tokens of a prompt's last chunk on a GPU: its blocks are waited for."""


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


def open_speculator(
    settings: WorkerSettings,
    runner: StepRunner,
    structures: StructureCompiler,
    draft: LoadedDraft | None = None,
    roles: Roles = BOTH,
) -> Speculator | None:
    """What guesses, as the settings say; None where nothing does. Raises ConfigError where the draft's pool does not
    fit."""
    if settings.speculation == "off":
        return None
    problem = _no_guesses(settings, runner)
    if problem:
        logger.warning(
            "speculation %s guesses nothing on device %s: %s", settings.speculation, settings.device, problem
        )
        return None
    drafters: list[Drafter] = [] if settings.speculation == "heads" else [NgramDrafter()]
    if settings.speculation == "auto":
        drafters.append(GrammarDrafter(structures.prepare))
    model: GuessingModel | None = None
    if isinstance(runner, Runner) and runner.heads is not None and WorkerRole.DECODE in roles:
        model = open_heads(runner.heads)
        logger.info("%s guesses", settings.head_folder or "the checkpoint's head")
    if draft is not None:
        model = open_draft(draft.decoder, draft.layout, draft.num_blocks, settings.max_num_seqs)
        logger.info(
            "draft model %s guesses: %d blocks of %d bytes", settings.draft, draft.num_blocks, draft.layout.block_bytes
        )
    # Where others compute, the thread's time leaves out the steps.
    clock = None if settings.is_on_gpu else time.thread_time
    return Speculator(drafters, model=model, processor_clock=clock)


def _no_guesses(settings: WorkerSettings, runner: StepRunner) -> str:
    """Why nothing is guessed on the device, or an empty string."""
    if settings.step_times is not None:
        return "it computes nothing"
    if isinstance(runner, Runner) and not settings.may_guess(has_states=runner.layout.num_states > 0):
        return "guesses of models whose layers keep states are computed on CPUs"
    return ""


def start_runner(
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
