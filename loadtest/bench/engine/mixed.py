"""`python -m loadtest.bench step-times`: steps of the engine that decode and compute a prompt's chunk at once, beside
those that do one of the two.

Every step runs once a round, in an order that turns by one step a round: a machine whose speed drifts drifts for all of
them. A step's time is that of its fastest round, since other work on the machine only adds to it. From a half of the
steps the model of step times is fitted, and from the steps that do one thing only; both predict the others.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from loadtest.bench.engine.cuda import LLAMA_8B, in_groups
from loadtest.bench.kernels.limits import cuda_device
from loadtest.rig.command_line import Option, Out, choice, integers
from loadtest.rig.measure import percentile
from loadtest.rig.models import SHAPES, model_folder
from loadtest.rig.results import Report, Result, machine
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.kernels.pool_view import dtype_name
from shared.model.decoder import Decoder
from shared.model.families.registry import parse_config
from shared.model.random_weights import random_decoder
from shared.sizing.step_fit import fitted
from shared.sizing.step_time import StepTimes, StepWork

BLOCK_SIZE = 16
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class MixedStep:
    """`num_decodes` sequences that decode behind `start` tokens, and a prompt's next `chunk` tokens behind `before`."""

    num_decodes: int
    start: int
    chunk: int
    before: int = 0

    @property
    def name(self) -> str:
        """As the report has it."""
        behind = f" behind {self.before}" if self.before else ""
        chunk = f"chunk of {self.chunk}{behind}"
        if not self.num_decodes:
            return chunk
        decodes = f"{self.num_decodes} decodes at {self.start}"
        return f"{decodes} and a {chunk}" if self.chunk else decodes

    @property
    def num_tokens(self) -> int:
        """Computed by the step."""
        return self.num_decodes + self.chunk

    @property
    def work(self) -> StepWork:
        """As the model of step times counts it."""
        work = StepWork(self.num_decodes, self.num_decodes * (self.start + 1))
        return work.with_chunk(self.chunk, self.before) if self.chunk else work

    @property
    def num_blocks(self) -> int:
        """Blocks of all its sequences together."""
        return max(self.plan(2).sequences[-1].block_ids) + 1

    def plan(self, vocab_size: int, logprobs: int | None = None) -> StepPlan:
        """Each sequence with blocks of its own, all of them greedy; `logprobs` alternatives beside each token."""
        items, begin = [], 0
        chunk = [(self.before, self.chunk)] if self.chunk else []
        for index, (start, count) in enumerate([*[(self.start, 1)] * self.num_decodes, *chunk]):
            end = begin - (-(start + count) // BLOCK_SIZE)
            tokens = tuple((7 * index + 13 * j) % vocab_size for j in range(count))
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=1, logprobs=logprobs)
            spec = SampleSpec(params, start + count)
            items.append(PlannedSequence(f"s{index}", tokens, start, tuple(range(begin, end)), start + count, (spec,)))
            begin = end
        return StepPlan(tuple(items))


def mixed_steps(contexts: Sequence[int], decodes: Sequence[int], chunks: Sequence[int]) -> list[MixedStep]:
    """Each chunk beside each batch, at the contexts in turn; and every chunk and every batch alone."""
    behind = (0, 512)
    alone = [MixedStep(0, 0, chunk, before) for chunk in chunks for before in behind]
    batches = [MixedStep(count, context, 0) for context in contexts for count in decodes]
    both = [
        MixedStep(count, contexts[(i + j) % len(contexts)], chunk, behind[(i + j // 2) % 2])
        for i, count in enumerate(decodes)
        for j, chunk in enumerate(chunks)
    ]
    return alone + batches + both


def in_rounds(steps: Sequence[MixedStep], run: Callable[[MixedStep], object], rounds: int) -> list[list[float]]:
    """Seconds of each step's runs, one a round; a run before the first round warms up."""
    found: list[list[float]] = [[] for _ in steps]
    for number in range(-1, rounds):
        for turn in range(len(steps)):
            index = (turn + max(0, number)) % len(steps)
            begin = time.perf_counter()
            run(steps[index])
            if number >= 0:
                found[index].append(time.perf_counter() - begin)
    return found


def results(steps: Sequence[MixedStep], seconds: Sequence[float]) -> list[Result]:
    """Milliseconds of each step."""
    return [Result(step.name, 1000 * taken, "ms") for step, taken in zip(steps, seconds, strict=True)]


def held_out(steps: Sequence[MixedStep], seconds: Sequence[float]) -> list[Result]:
    """How well the model of step times, fitted to some of the steps, predicts those that do both and that it has not
    seen: the median and the 90th percentile of the relative errors, in percent.

    `halves`: fitted to every other step, for both halves. `from one thing`: fitted to the steps that do one thing only.
    """
    works = [step.work for step in steps]
    is_mixed = [bool(step.num_decodes and step.chunk) for step in steps]
    halves: list[float] = []
    for half in (0, 1):
        seen = [index for index in range(len(steps)) if index % 2 == half]
        unseen = [index for index in range(len(steps)) if index % 2 != half and is_mixed[index]]
        halves += _errors(works, seconds, seen, unseen)
    alone = [index for index, mixed in enumerate(is_mixed) if not mixed]
    both = [index for index, mixed in enumerate(is_mixed) if mixed]
    found = []
    for name, errors in (("halves", halves), ("from one thing", _errors(works, seconds, alone, both))):
        for percent in (50, 90):
            error = percentile(errors, percent) if errors else math.nan
            found.append(Result(f"mixed steps predicted, {name}, p{percent} error", 100 * error, "%"))
    return found


def sums(steps: Sequence[MixedStep], seconds: Sequence[float]) -> list[Result]:
    """A mixed step's time over the sum of both parts' steps alone, where these were measured too."""
    taken = dict(zip(steps, seconds, strict=True))
    found = []
    for step in steps:
        parts = (MixedStep(step.num_decodes, step.start, 0), MixedStep(0, 0, step.chunk, step.before))
        if step.num_decodes and step.chunk and all(part in taken for part in parts):
            together = sum(taken[part] for part in parts)
            found.append(Result(f"{step.name}, over the sum", taken[step] / together, "x"))
    return found


def coefficients(times: StepTimes) -> list[Result]:
    """The model of step times, fitted to all steps."""
    return [
        Result("step time: fixed", 1e3 * times.fixed_s, "ms"),
        Result("step time: reading the weights", 1e3 * times.read_s, "ms"),
        Result("step time: a token's products", 1e6 * times.token_s, "us"),
        Result("step time: a sequence", 1e6 * times.sequence_s, "us"),
        Result("step time: a context token", 1e9 * times.kv_s, "ns"),
        Result("step time: a pair of a chunk", 1e9 * times.attention_s, "ns"),
        Result("step time: overlap", times.overlap, ""),
    ]


def report(steps: Sequence[MixedStep], seconds: Sequence[float]) -> list[Result]:
    """All that is said of these steps."""
    fitted_times = fitted([step.work for step in steps], seconds)
    return [
        *results(steps, seconds),
        *sums(steps, seconds),
        *coefficients(fitted_times),
        *held_out(steps, seconds),
    ]


def _errors(
    works: Sequence[StepWork], seconds: Sequence[float], seen: Sequence[int], unseen: Sequence[int]
) -> list[float]:
    if not seen or not unseen:
        return []
    times = fitted([works[index] for index in seen], [seconds[index] for index in seen])
    return [abs(times.step_s(works[index]) / seconds[index] - 1) for index in unseen]


def measure(decoder: Decoder, steps: Sequence[MixedStep], rounds: int, pieces: int = 0) -> list[float]:
    """Least seconds of each step, by a runner with a pool of its own. `pieces`: longest step that runs in captured
    pieces."""
    config = decoder.config
    layout = config.block_layout(BLOCK_SIZE, dtype_name(decoder.dtype))
    most = max(step.num_tokens for step in steps)
    longest = max(max(step.start + 1, step.before + step.chunk) for step in steps)
    batch = max(step.num_decodes + bool(step.chunk) for step in steps)
    settings = RunnerConfig(batch, longest, most, piecewise_tokens=pieces)
    runner = Runner(decoder, layout, max(step.num_blocks for step in steps) * layout.groups.size, settings)
    runner.pool.rows.normal_()
    runner.start()
    plans = {step: in_groups(step.plan(config.vocab_size), layout) for step in steps}
    return [min(runs) for runs in in_rounds(steps, lambda step: runner.execute(plans[step]), rounds)]


def main(
    model: Annotated[str, Option(help=f"a model folder, or one of {', '.join(SHAPES)}; on cuda an 8B shape")] = "125m",
    device: Annotated[str, Option(help=" or ".join(DEVICES))] = "cpu",
    threads: Annotated[int, Option(help="compute threads; 0 = all cores")] = 0,
    decodes: Annotated[str, Option(help="sequences that decode")] = "1 8 32",
    context: Annotated[str, Option(help="cached tokens of each of them, in turns")] = "512 1024 256",
    chunk: Annotated[str, Option(help="tokens of a prompt beside them")] = "16 32 64 128 256 512 1024",
    rounds: Annotated[int, Option(help="runs of each step")] = 7,
    piecewise_tokens: Annotated[int, Option(help="longest step that runs in captured pieces; 0 = none")] = 0,
    out: Out = None,
) -> None:
    """Measure mixed steps beside their parts, and how well the model of step times predicts them."""
    if choice(device, "device", DEVICES) == "cuda":
        cuda_device("this benchmark", "; without one: --device cpu")
    steps = mixed_steps(*(integers(*asked) for asked in ((context, "context"), (decodes, "decodes"), (chunk, "chunk"))))
    if threads:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        seconds = measure(_decoder(model, device), steps, rounds, piecewise_tokens)
    written = Report(out)
    written.add(report(steps, seconds))
    print(f"{model if device == 'cpu' else '8B shape'} in bf16 on {machine()}, load {os.getloadavg()[0]:.1f}\n")
    written.print()


def _decoder(model: str, device: str) -> Decoder:
    if device == "cuda":
        return random_decoder(parse_config(LLAMA_8B), torch.bfloat16, torch.device("cuda"))
    return Decoder.load(model_folder(model), torch.bfloat16, "cpu")
