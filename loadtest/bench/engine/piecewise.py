"""`python -m loadtest.bench piecewise`: short prompts and mixed steps of an 8B-shaped engine, eager and in pieces.

The two take turns over pools of their own, and each pair must choose the same tokens. Where weights are drawn, the best
tokens lie close together: another one counts as the same if its log-probability is within what 16 bits tell apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.engine.cuda import BLOCK_SIZE, LLAMA_8B
from loadtest.bench.engine.mixed import MixedStep
from loadtest.bench.kernels.limits import cuda_device
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from shared.engine.plan import NoToken, SampledToken, StepResult
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.kernels.pool_view import dtype_name
from shared.model.decoder import Decoder
from shared.model.families.registry import parse_config
from shared.model.random_weights import random_decoder

SAME_LOGPROB = 0.05


LOGPROBS = 8
"""Alternatives to each token, among which the other way's is looked for."""


def label(step: MixedStep) -> str:
    """As the report has it."""
    chunk = f"chunk of {step.chunk}"
    return f"{step.num_decodes} decodes and a {chunk}" if step.num_decodes else chunk


STEPS = (
    *(MixedStep(0, 0, chunk) for chunk in (32, 128, 500, 1000)),
    *(MixedStep(decodes, 512, chunk) for decodes in (8, 64) for chunk in (32, 250)),
)


class Pair:
    """One decoder behind two runners."""

    def __init__(self, decoder: Decoder, steps: Sequence[MixedStep]) -> None:
        """Both are ready for these steps when it returns; that took them `start_s` and `start_bytes` of the device's
        memory, the eager one first."""
        config = decoder.config
        layout = config.block_layout(BLOCK_SIZE, dtype_name(decoder.dtype))
        most = max(step.num_tokens for step in steps)
        num_blocks = max(step.num_blocks for step in steps)
        self.vocab_size = config.vocab_size
        self.runners: list[Runner] = []
        self.start_s: list[float] = []
        self.start_bytes: list[int] = []
        for piecewise in (0, most):
            settings = RunnerConfig(max_num_batched_tokens=most, static_decode=False, piecewise_tokens=piecewise)
            runner = Runner(decoder, layout, num_blocks, settings)
            free, begin = _free_bytes(decoder.device), time.perf_counter()
            runner.start()
            self.start_s.append(time.perf_counter() - begin)
            self.start_bytes.append(free - _free_bytes(decoder.device))
            self.runners.append(runner)
        # Not drawn for each: pools of different sizes, one has a block for padding, would get different numbers.
        eager, pieces = self.runners
        eager.pool.rows.normal_()
        pieces.pool.rows[:num_blocks].copy_(eager.pool.rows)

    def measure(self, step: MixedStep, repeats: int) -> list[Result]:
        """Milliseconds of both, and how many of the tokens are the same."""
        plan = step.plan(self.vocab_size, LOGPROBS)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats + 2):
            results = []
            for runner, taken in zip(self.runners, seconds, strict=True):
                begin = time.perf_counter()
                results.append(runner.execute(plan))
                taken.append(time.perf_counter() - begin)
        eager, pieces = (1000 * median(taken[2:]) for taken in seconds)  # the first compile
        num_same = count_same(*results)
        return [
            Result(f"{label(step)}, eager", eager, "ms"),
            Result(f"{label(step)}, in pieces", pieces, "ms"),
            Result(f"{label(step)}, eager / in pieces", eager / pieces, "x"),
            Result(f"{label(step)}, same tokens", num_same, "", len(plan.sequences), num_same / len(plan.sequences)),
        ]


def _free_bytes(device: torch.device) -> int:
    """Free bytes of the device's memory, without what torch keeps for reuse; 0 for the host's, which other processes
    take too."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def count_same(one: StepResult, other: StepResult) -> int:
    """Rows whose token in `other` is that of `one`, or one that `one` finds as likely; none without a token."""
    return sum(_is_same(a, b) for a, b in zip(one.sampled, other.sampled, strict=True))


def _is_same(one: SampledToken | NoToken, other: SampledToken | NoToken) -> bool:
    if not isinstance(one, SampledToken) or not isinstance(other, SampledToken):
        return False
    best = one.top[0][1]
    return dict(one.top).get(other.token_id, float("-inf")) >= best - SAME_LOGPROB


def main(repeats: Annotated[int, Option()] = 20, out: Out = None) -> None:
    """Measure prompts and mixed steps on a GPU, eager and in captured pieces. Fails where tokens differ."""
    device = cuda_device("this benchmark")
    report = Report(out)
    with torch.inference_mode():
        pair = Pair(random_decoder(parse_config(LLAMA_8B), torch.bfloat16, device), STEPS)
        report.add([Result("start with pieces, beside without", pair.start_s[1] - pair.start_s[0], "s")])
        report.add([Result("memory of the pieces' graphs", pair.start_bytes[1] / (1 << 20), "MiB")])
        for step in STEPS:
            report.add(pair.measure(step, repeats))
            print(f"{label(step)}: {report.results[-2].value:.2f} times as fast in pieces", flush=True)
    report.print()
    differing = [result.name for result in report.results if result.fraction is not None and result.fraction < 1]
    if differing:
        sys.exit(f"tokens differ: {', '.join(differing)}")
