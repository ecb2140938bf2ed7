"""`make bench-engine`: prefill and decode steps of the engine, each as a share of what the hardware allows.

Steps are planned by hand and run by the engine's own runner: attention, projections, sampling, input preparation, all
but the scheduler. A decode step's floor is reading all weights and the batch's KV once; a prompt's is its FLOPs.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest.bench.engine.limits import matmul_rate, read_bandwidth, timed
from loadtest.bench.engine.overhead import step_time
from loadtest.bench.peers.contestant import Settings
from loadtest.bench.peers.ours import Ours
from loadtest.bench.shapes import SHAPES, checkpoint
from loadtest.figures import Result, machine, table, write
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner.runner import Runner
from shared.engine.sampling_params import SamplingParams
from shared.kv.layout import BlockLayout
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder

BLOCK_SIZE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, seed=0)


class Bench:
    """One model, ready to run steps of any shape."""

    def __init__(self, folder: Path, dtype: torch.dtype, kernels: str, num_kv_tokens: int) -> None:
        self.decoder = Decoder.load(folder, dtype, "cpu", kernels=kernels)
        config = self.decoder.config
        name = str(dtype).removeprefix("torch.")
        self.layout = BlockLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, name)
        self.runner = Runner(self.decoder, self.layout, num_kv_tokens // BLOCK_SIZE + 64)
        # Blocks never written would all lie on one page of zeros, and reading them would cost nothing.
        self.runner.kv_blocks.fill_(0.01)

    def plan(self, batch: int, start: int, count: int) -> StepPlan:
        """`batch` sequences that compute `count` tokens behind `start` cached ones, each with blocks of its own."""
        blocks = -(-(start + count) // BLOCK_SIZE)
        return StepPlan(
            tuple(
                PlannedSequence(
                    f"s{i}",
                    tuple(3 + (7 * i + j) % 1000 for j in range(count)),
                    start,
                    tuple(range(i * blocks, (i + 1) * blocks)),
                    start + count,
                    SampleSpec(GREEDY, start + count),
                )
                for i in range(batch)
            )
        )

    def step_s(self, plan: StepPlan, repeats: int) -> float:
        """Median seconds of the step."""
        with torch.inference_mode():
            return timed(lambda: self.runner.execute(plan), repeats)

    @property
    def num_parameters(self) -> int:
        """Parameters that take part in a token's products."""
        c = self.decoder.config
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        layer = c.hidden_size * (heads + c.num_heads * c.head_dim + 3 * c.intermediate_size)
        return c.num_layers * layer + c.vocab_size * c.hidden_size

    def prefill_flops(self, num_tokens: int) -> float:
        """Products of the projections for every token (the head's for one), and causal attention."""
        c = self.decoder.config
        head = c.vocab_size * c.hidden_size
        attention = 2 * c.num_layers * c.num_heads * c.head_dim * num_tokens**2
        return 2.0 * (self.num_parameters - head) * num_tokens + 2.0 * head + attention


@dataclass(frozen=True)
class Step:
    """A step to be measured: `batch` sequences compute `count` tokens each, behind `start` cached ones."""

    batch: int
    start: int
    count: int

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"decode {self.batch} at {self.start}" if self.count == 1 else f"prefill {self.count}"

    @property
    def num_kv_tokens(self) -> int:
        """Slots of whole blocks that it takes."""
        return self.batch * -(-(self.start + self.count) // BLOCK_SIZE) * BLOCK_SIZE


def run(bench: Bench, steps: list[Step], repeats: int) -> list[Result]:
    """All steps, the limit of each measured just before, since a shared machine drifts."""
    return [(_prefill if step.count > 1 else _decode)(bench, step, repeats) for step in steps]


def _prefill(bench: Bench, step: Step, repeats: int) -> Result:
    limit = step.count * matmul_rate(3) / bench.prefill_flops(step.count)
    value = step.count / bench.step_s(bench.plan(step.batch, step.start, step.count), max(3, repeats // 3))
    return Result(step.name, value, "tok/s", limit, value / limit)


def _decode(bench: Bench, step: Step, repeats: int) -> Result:
    """A small batch is bound by reading weights, as they lie in memory, and KV, a large one by its products: the nearer
    limit counts."""
    kv_bytes = step.batch * step.start * bench.layout.block_bytes / BLOCK_SIZE
    reading_s = (bench.decoder.projection_bytes + kv_bytes) / read_bandwidth(3)
    products_s = 2.0 * step.batch * bench.num_parameters / matmul_rate(3)
    limit = step.batch / max(reading_s, products_s)
    value = step.batch / bench.step_s(bench.plan(step.batch, step.start, 1), repeats)
    return Result(step.name, value, "tok/s", limit, value / limit)


def overheads(folder: Path, batches: list[int], context: int) -> list[Result]:
    """Of whole engine steps, scheduler and events included."""
    engine = Ours(Settings(folder, folder, torch.get_num_threads()))
    try:
        found = [(batch, step_time(engine, batch, context, 16)) for batch in batches]
    finally:
        engine.close()
    return [
        Result(f"decode {batch} at {context}, outside kernels", 100 * step.overhead, "% of the step")
        for batch, step in found
        if step is not None
    ]


def kv_room(config: ModelConfig, dtype: torch.dtype, folder: Path) -> int:
    """Tokens whose KV fits in the memory that is free once the weights are loaded, with half of it left over."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    layout = BlockLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, str(dtype)[6:])
    return max(0, free - weights) // 2 // (layout.block_bytes // BLOCK_SIZE)


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="125m", help=f"a model folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--kernels", default="auto", help="backend of the ops: auto, cpu, torch")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 = all cores")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192], help="prompt lengths")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 64, 256], help="sequences that decode")
    parser.add_argument("--context", type=int, nargs="*", default=[256, 2048], help="tokens behind each of them")
    parser.add_argument("--overhead", type=int, nargs="*", default=[1, 32], help="batches whose overhead is measured")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = checkpoint(args.model) if args.model in SHAPES else Path(args.model)
    dtype = DTYPES[args.dtype]
    steps = [Step(1, 0, n) for n in args.prefill] + [Step(b, c, 1) for c in args.context for b in args.batch]
    room = kv_room(ModelConfig.load(folder), dtype, folder)
    fitting = [step for step in steps if step.num_kv_tokens <= room]
    results = overheads(folder, args.overhead, 256) if dtype == torch.bfloat16 else []
    bench = Bench(folder, dtype, args.kernels, max((step.num_kv_tokens for step in fitting), default=0))
    results = run(bench, fitting, args.repeats) + results
    print(f"{args.model} in {args.dtype}, kernels {bench.decoder.kernels.name}, on {machine()}\n")
    print(table(results))
    for step in steps:
        if step not in fitting:
            print(f"{step.name} is left out: its KV of {step.num_kv_tokens} tokens does not fit in memory, {room} do")
    if args.out:
        write(args.out, results)


if __name__ == "__main__":
    main()
