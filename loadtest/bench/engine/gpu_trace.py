"""`python -m loadtest.bench gpu-trace`: which kernels a decode step and a prompt spend their time in."""

from __future__ import annotations

from typing import Annotated

import torch
from torch.profiler import ProfilerActivity, profile

from loadtest.bench.engine.cuda import LLAMA_8B, EngineBench, Step
from loadtest.bench.kernels.limits import cuda_device
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from shared.model.families.registry import parse_config
from shared.model.random_weights import random_decoder

STEPS = (Step(64, 2048, 1), Step(1, 0, 2048))
_MOST_ROWS = 25


def kernel_times(bench: EngineBench, step: Step) -> list[Result]:
    """Milliseconds on the device by kernel, the longest first."""
    plan = step.plan(bench.config.vocab_size, pending=False)
    bench.runner.execute(plan)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        bench.runner.execute(plan)
    kernels = [(event.key, event.self_device_time_total) for event in recorded.key_averages()]
    longest = sorted(((name, us) for name, us in kernels if us > 0), key=lambda item: -item[1])
    return [Result(f"{step.name}: {name}", us / 1e3, "ms") for name, us in longest[:_MOST_ROWS]]


def run_marked(bench: EngineBench, step: Step) -> None:
    """The same step for a profiler of NVIDIA's: begun and ended where its `--profile-from-start off` listens."""
    plan = step.plan(bench.config.vocab_size, pending=False)
    bench.runner.execute(plan)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call, unused-ignore]
    bench.runner.execute(plan)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call, unused-ignore]


def main(
    layers: Annotated[int, Option("layers of the 8B shape")] = 4,
    marked: Annotated[bool, Option("measure nothing, mark the steps for ncu or nsys, which torch disturbs")] = False,
    out: Out = None,
) -> None:
    """Profile one decode step and one prompt of an 8B-shaped engine."""
    device = cuda_device("this profile")
    config = parse_config({**LLAMA_8B, "num_hidden_layers": layers})
    report = Report(out)
    with torch.inference_mode():
        bench = EngineBench(random_decoder(config, torch.bfloat16, device), STEPS)
        for step in STEPS:
            if marked:
                run_marked(bench, step)
                continue
            report.add(kernel_times(bench, step))
    report.print()
