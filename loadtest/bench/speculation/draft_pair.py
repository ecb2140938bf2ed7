"""For measurements of a draft model's guesses beside models of any size: a small pair says what the answer is and what
is guessed, and models with random weights compute as much as they would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shared.engine.plan import NoToken, PlannedSequence, SampledToken, SampleSpec, StepPlan, StepResult
from shared.engine.runner.block_access import BlockAccess
from shared.engine.runner.draft import draft_layout, load_draft
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.runner.sampler import PendingStep
from shared.engine.sampling_params import SamplingParams
from shared.engine.speculation.draft_model import DraftModel
from shared.engine.speculation.head_model import HeadGuess
from shared.kernels.lora.step import PackedAdapter
from shared.kv.pool import BlockPool
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config


def answer_of(
    folder: Path, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams, block_size: int
) -> list[int]:
    """The first tokens of a model's answer; its end does not end it."""
    decoder = Decoder.load(folder, torch.float32, "cpu")
    num_blocks = -(-(len(prompt) + num_tokens) // block_size)
    runner = Runner(decoder, draft_layout(decoder, block_size), num_blocks, RunnerConfig(max_num_seqs=1))
    tokens, start, table = list(prompt), 0, tuple(range(num_blocks))
    banned = tuple(decoder.config.eos_token_ids)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + num_tokens:
            spec = SampleSpec(sampling, len(tokens), banned_token_ids=banned)
            item = PlannedSequence("answer", tuple(tokens[start:]), start, table, len(prompt), samples=(spec,))
            start = len(tokens)
            (found,) = runner.execute(StepPlan((item,))).sampled
            assert isinstance(found, SampledToken)
            tokens.append(found.token_id)
    return tokens[len(prompt) :]


class PairedRunner:
    """Computes as one draft and guesses as another one, each over its own pool. Implements `DraftRunner`."""

    def __init__(self, computes: Runner, guesses: Runner) -> None:
        self._computes, self._guesses = computes, guesses

    def execute(self, plan: StepPlan) -> StepResult:
        """See `DraftRunner`."""
        self._computes.execute(plan)
        return self._guesses.execute(plan)


def paired_draft(
    computes: Path, guesses: Path, target: Path, num_blocks: int, block_size: int, most_seqs: int
) -> DraftModel:
    """A draft that takes as long as `computes` and what `guesses` takes besides, and guesses as this one does for
    `target`. In bf16, and fp32."""
    config = RunnerConfig(max_num_seqs=most_seqs)
    shape = Decoder.load(computes, torch.bfloat16, "cpu")
    own = load_draft(guesses, torch.float32, load_config(target).vocab_size)
    runners = [Runner(decoder, draft_layout(decoder, block_size), num_blocks, config) for decoder in (shape, own)]
    return DraftModel(PairedRunner(*runners), BlockPool(num_blocks, block_size), own.config.max_position_embeddings)


class PairedSteps:
    """Computes as one model with a head and chooses, and guesses, as another one with a head, over pools of as many
    blocks. Implements `StepRunner` and `HeadRunner`."""

    def __init__(self, computes: Runner, chooses: Runner) -> None:
        assert computes.heads is not None
        assert chooses.heads is not None
        self._computes, self._chooses = computes, chooses
        self._heads = computes.heads, chooses.heads

    @property
    def is_async(self) -> bool:
        """See `StepRunner`."""
        return False

    @property
    def blocks(self) -> BlockAccess:
        """See `StepRunner`."""
        return self._computes.blocks

    def checksums(self, block_ids: list[int]) -> list[int]:
        """See `StepRunner`."""
        return self._computes.checksums(block_ids)

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """See `StepRunner`."""
        raise NotImplementedError("adapters are not measured with heads")

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `StepRunner`."""
        self._computes.execute(plan)
        return self._chooses.launch(plan)

    def is_ready(self, sequence_id: str, position: int) -> bool:
        """See `HeadRunner`."""
        return all(heads.is_ready(sequence_id, position) for heads in self._heads)

    def guess(self, guesses: Sequence[HeadGuess]) -> tuple[SampledToken | NoToken, ...]:
        """See `HeadRunner`."""
        computes, chooses = self._heads
        computes.guess(guesses)
        return chooses.guess(guesses)


def paired_steps(computes: Decoder, chooses: Path, num_blocks: int, block_size: int, most_seqs: int) -> PairedSteps:
    """Steps of a decoder with a head, and of a small checkpoint with one, which is loaded in fp32."""
    config, small = RunnerConfig(max_num_seqs=most_seqs), Decoder.load(chooses, torch.float32, "cpu", has_head=True)
    layouts = (
        decoder.config.block_layout(block_size, str(decoder.dtype).removeprefix("torch."), has_head=True)
        for decoder in (computes, small)
    )
    big, own = (
        Runner(decoder, layout, num_blocks, config) for decoder, layout in zip((computes, small), layouts, strict=True)
    )
    return PairedSteps(big, own)
