"""Answers of one engine to the same prompts in other circumstances, and how many of them differ."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.engine.plan import SampledToken
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.kv.pool import BlockPool
from shared.model.decoder import Decoder

BLOCK_SIZE = 16
BATCH = 12
CHUNK = 512
NUM_BLOCKS = 400

Answer = tuple[SampledToken, ...]


@dataclass(frozen=True)
class Prompt:
    """What is asked."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


def make_prompts(number: int, vocab_size: int, num_tokens: int, temperature: float, seed: int = 0) -> list[Prompt]:
    """Prompts of 20 to 200 tokens, whose answers have `num_tokens` each."""
    draw = random.Random(seed)
    found = []
    for i in range(number):
        ids = tuple(draw.randrange(10, vocab_size) for _ in range(draw.randint(20, 200)))
        sampling = SamplingParams(temperature=temperature, seed=i, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
        found.append(Prompt(ids, sampling))
    return found


class Engine:
    """Scheduler and runner of one model; every call begins with an empty pool, so nothing is found computed."""

    def __init__(self, folder: Path, dtype: torch.dtype, kernels: str, *, deterministic: bool) -> None:
        self.decoder = Decoder.load(folder, dtype, "cpu", kernels=kernels, deterministic=deterministic)
        layout = self.decoder.config.block_layout(BLOCK_SIZE, str(dtype).removeprefix("torch."))
        self._runner = Runner(self.decoder, layout, NUM_BLOCKS, RunnerConfig(BATCH))

    def answer(self, prompts: Sequence[Prompt], so_far: Sequence[Answer] = ()) -> list[Answer]:
        """Of prompts that run together, at most `BATCH`. `so_far`: what each has been answered already; it is computed
        again behind its prompt, as after the loss of a worker, and begins the answer."""
        scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), SchedulerConfig(BATCH, CHUNK))
        found: dict[str, list[SampledToken]] = {}
        for i, prompt in enumerate(prompts):
            given = list(so_far[i]) if so_far else []
            found[str(i)] = given.copy()
            ids = [*prompt.token_ids, *(token.token_id for token in given)]
            total = len(prompt.token_ids) + (prompt.sampling.max_tokens or 0)
            scheduler.add(
                EngineSequence(
                    str(i), ids, len(prompt.token_ids), prompt.sampling, b"bench", Goal.COMPLETION, total, frozenset()
                )
            )
        with torch.inference_mode():
            while scheduler.has_work:
                plan = scheduler.schedule()
                output = scheduler.apply(plan, self._runner.launch(plan).result())
                for new in output.tokens:
                    found[new.sequence_id].append(new.token)
        return [tuple(tokens) for tokens in found.values()]

    def alone(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Each prompt by itself."""
        return [answer for prompt in prompts for answer in self.answer([prompt])]

    def together(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """`BATCH` prompts at a time."""
        groups = [prompts[i : i + BATCH] for i in range(0, len(prompts), BATCH)]
        return [answer for group in groups for answer in self.answer(group)]

    def resumed(self, prompts: Sequence[Prompt], answers: Sequence[Answer], seed: int = 1) -> list[Answer]:
        """Each by itself, from a random place of its answer on."""
        draw = random.Random(seed)
        kept = [answer[: draw.randint(1, len(answer) - 1)] for answer in answers]
        return [found for prompt, part in zip(prompts, kept, strict=True) for found in self.answer([prompt], [part])]


def share_of_other_tokens(found: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Of answers with another token somewhere."""
    return _share([a.token_id for a in x] != [b.token_id for b in y] for x, y in zip(found, expected, strict=True))


def share_of_other_bits(found: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Of answers with another token, or another log-probability of one, somewhere."""
    return _share(x != y for x, y in zip(found, expected, strict=True))


def _share(differ: Iterable[bool]) -> float:
    flags = list(differ)
    return sum(flags) / len(flags)
