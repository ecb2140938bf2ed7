"""`python -m loadtest.bench engine`: prefill and decode steps of the engine beside what the processor allows.

Steps are planned by hand and run by the engine's own runner: attention, projections, sampling, input preparation,
everything but the scheduler. A decode step takes at least the time to read all weights and the batch's KV once, a
prompt the time of its FLOPs.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any

import torch

from loadtest.bench.engine.cuda import BLOCK_SIZE, Step, in_groups
from loadtest.bench.engine.mixed import measure, mixed_steps, report
from loadtest.bench.engine.step_work import active_parameters, matmul_rate, prefill_flops, read_bandwidth, weight_bytes
from loadtest.bench.peers.adapter import Settings, random_prompt
from loadtest.bench.peers.ours import Ours
from loadtest.rig.command_line import Option, Out, choice, integers
from loadtest.rig.measure import median_s
from loadtest.rig.models import SHAPES, model_folder
from loadtest.rig.results import Report, Result, machine
from shared.engine.runner.runner import Runner
from shared.kernels.cpu.launch import CpuOps
from shared.kernels.pool_view import dtype_name
from shared.model.config.model_config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2}
"""The first is the default of models whose generation_config.json names one."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KV_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Bench:
    """One model, ready to run steps of any shape."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, kernels: str, num_kv_tokens: int, kv_dtype: torch.dtype | None = None
    ) -> None:
        """`kv_dtype`: None = `dtype`."""
        self.decoder = Decoder.load(folder, dtype, "cpu", kernels=kernels)
        self.layout = self.decoder.config.block_layout(BLOCK_SIZE, dtype_name(kv_dtype or dtype))
        self.runner = Runner(self.decoder, self.layout, (num_kv_tokens // BLOCK_SIZE + 64) * self.layout.groups.size)
        # Blocks never written would all lie on one page of zeros, and reading them would cost nothing.
        # These bytes are about 0.011 in fp32 and bf16, and usual codes with such scales.
        self.runner.kv_blocks.fill_(0x3C)

    def step_s(self, step: Step, repeats: int) -> float:
        """Median seconds of the step."""
        plan = in_groups(step.plan(self.decoder.config.vocab_size), self.layout)
        with torch.inference_mode():
            return median_s(lambda: self.runner.execute(plan), repeats)


def run(bench: Bench, steps: list[Step], repeats: int) -> list[Result]:
    """All steps, the limit of each measured just before, since a shared machine drifts."""
    return [(_prefill if step.count > 1 else _decode)(bench, step, repeats) for step in steps]


def _prefill(bench: Bench, step: Step, repeats: int) -> Result:
    limit = step.count * matmul_rate(3) / prefill_flops(bench.decoder.config, step.count)
    value = step.count / bench.step_s(step, max(3, repeats // 3))
    return Result(step.name, value, "tok/s", limit, value / limit)


def _decode(bench: Bench, step: Step, repeats: int) -> Result:
    """A small batch is bound by reading weights, as they lie in memory, and KV, a large one by its products: the nearer
    limit counts."""
    kv_bytes = step.batch * bench.layout.groups.num_blocks(step.start) * bench.layout.block_bytes
    reading_s = (weight_bytes(bench.decoder, step.batch) + kv_bytes) / read_bandwidth(3)
    products_s = 2.0 * step.batch * active_parameters(bench.decoder.config) / matmul_rate(3)
    limit = step.batch / max(reading_s, products_s)
    value = step.batch / bench.step_s(step, repeats)
    return Result(step.name, value, "tok/s", limit, value / limit)


def overheads(folder: Path, batches: list[int], context: int) -> list[Result]:
    """Host time of whole engine steps, scheduler and events included: greedy answers, and answers with penalties."""
    engine = Ours(Settings(folder, folder, torch.get_num_threads()), max(batches, default=1))
    results = []
    try:
        for batch in batches:
            for way, sampling in (("", {}), (", penalties", PENALTIES)):
                step = step_time(engine, batch, context, 16, sampling)
                if step is not None:
                    name = f"decode {batch} at {context}{way}, outside kernels"
                    results.append(Result(name, 1e3 * step.outside_s, "ms a step"))
                    results.append(Result(name, 100 * step.overhead, "% of the step"))
    finally:
        engine.close()
    return results


def kv_room(config: ModelConfig, kv_dtype: torch.dtype, folder: Path) -> int:
    """Tokens whose KV fits in the memory that is free once the weights are loaded, with half of it left over."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    layout = config.block_layout(BLOCK_SIZE, dtype_name(kv_dtype))
    return max(0, free - weights) // 2 // (layout.groups.size * layout.block_bytes // BLOCK_SIZE)


def main(
    model: Annotated[str, Option(help=f"a model folder, or a shape: {', '.join(SHAPES)}")] = "125m",
    dtype: Annotated[str, Option(help=" or ".join(DTYPES))] = "bf16",
    kv_dtype: Annotated[str, Option(help=f"of the KV cache: auto, {', '.join(KV_DTYPES)}")] = "auto",
    kernels: Annotated[str, Option(help="backend of the ops: auto, cpu, torch")] = "auto",
    threads: Annotated[int, Option(help="compute threads; 0 = all cores")] = 0,
    prefill: Annotated[str, Option(help="prompt lengths")] = "512 2048 8192",
    batch: Annotated[str, Option(help="sequences that decode")] = "1 8 32 64 256",
    context: Annotated[str, Option(help="cached tokens of each of them")] = "256 2048",
    overhead: Annotated[str, Option(help="batches whose overhead is measured")] = "1 64 256",
    chunk: Annotated[str, Option(help="chunks of a prompt beside decoding sequences; empty: none")] = "16 64 256 512",
    repeats: Annotated[int, Option()] = 9,
    out: Out = None,
) -> None:
    """Measure prefill and decode steps of the engine on this processor beside what its memory and arithmetic allow, and
    steps that do both beside what the model of step times predicts."""
    torch_dtype = DTYPES[choice(dtype, "dtype", DTYPES)]
    kept = torch_dtype if kv_dtype == "auto" else KV_DTYPES[choice(kv_dtype, "kv-dtype", KV_DTYPES)]
    steps = [Step(1, 0, n) for n in integers(prefill, "prefill")]
    steps += [Step(b, c, 1) for c in integers(context, "context") for b in integers(batch, "batch")]
    batches = integers(overhead, "overhead")
    if threads:
        torch.set_num_threads(threads)
    folder = model_folder(model)
    room = kv_room(load_config(folder), kept, folder)
    fitting = [step for step in steps if step.num_kv_tokens <= room]
    overhead_results = overheads(folder, batches, 256) if torch_dtype == torch.bfloat16 else []
    written = Report(out)
    bench = Bench(folder, torch_dtype, kernels, max((step.num_kv_tokens for step in fitting), default=0), kept)
    written.add(run(bench, fitting, repeats))
    written.add(overhead_results)
    if chunk:
        mixed = mixed_steps([512], [1, 8, 32], integers(chunk, "chunk"))
        with torch.inference_mode():
            written.add(report(mixed, measure(bench.decoder, mixed, repeats)))
    print(f"{model} in {dtype}, KV in {dtype_name(kept)}, kernels {bench.decoder.kernels.name}, on {machine()}\n")
    written.print()
    for step in steps:
        if step not in fitting:
            print(f"{step.name} is left out: its KV of {step.num_kv_tokens} tokens does not fit in memory, {room} do")


@dataclass(frozen=True)
class StepTime:
    """A decode step of the whole engine."""

    step_s: float
    """Median."""
    overhead: float
    """Share of the step outside the C++ kernels, median. Torch's few own ops, such as the embedding, count as overhead
    too, and so does reading the clock at each call."""
    outside_s: float
    """Seconds of a step outside the C++ kernels, median."""


class TimedLibrary:
    """Wraps the kernels' library and adds up the time inside its functions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.total_s = 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            function(*args)
            self.total_s += time.perf_counter() - start

        setattr(self, name, timed)
        return timed


def step_time(
    engine: Ours, batch: int, context: int, num_steps: int, sampling: Mapping[str, float] = MappingProxyType({})
) -> StepTime | None:
    """Step time of greedy answers with these further settings. None where other kernels than the C++ ones serve: their
    time cannot be measured from outside."""
    kernels = engine.decoder.kernels
    if not isinstance(kernels, CpuOps):
        return None
    generator = random.Random(batch)
    timed = TimedLibrary(kernels.library)
    untimed, kernels.library = kernels.library, timed  # type: ignore[assignment]
    try:
        prompts = [random_prompt(context, generator, engine.decoder.config.vocab_size) for _ in range(batch)]
        steps = engine.decode_steps(prompts, num_steps, lambda: timed.total_s, sampling)
    finally:
        kernels.library = untimed
    return StepTime(
        median(s for s, _ in steps),
        median(1 - inside / s for s, inside in steps),
        median(s - inside for s, inside in steps),
    )
