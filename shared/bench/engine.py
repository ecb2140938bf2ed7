"""`make bench-engine`: prefill and decode steps of the engine, each as a share of what the hardware allows.

Steps are planned by hand and run by the engine's own runner: attention, projections, sampling, input preparation, all
but the scheduler. A decode step's floor is reading all weights and the batch's KV once; a prompt's is its FLOPs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from shared.bench.limits import matmul_rate, read_bandwidth, timed
from shared.bench.report import Result, machine, table, write
from shared.bench.shapes import SHAPES, checkpoint
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner import Runner
from shared.engine.sampling_params import SamplingParams
from shared.kv.layout import BlockLayout
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
        self.runner.kv_blocks.normal_()

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
    def weight_bytes(self) -> int:
        """Bytes that a decode step must read: every parameter but the embedding's other rows."""
        return self.num_parameters * self.decoder.dtype.itemsize

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


def run(bench: Bench, prefills: list[int], batches: list[int], contexts: list[int], repeats: int) -> list[Result]:
    """All steps, with the limits measured in between, since a shared machine drifts."""
    results = []
    for num_tokens in prefills:
        rate = matmul_rate()
        seconds = bench.step_s(bench.plan(1, 0, num_tokens), max(3, repeats // 2))
        limit = num_tokens * rate / bench.prefill_flops(num_tokens)
        value = num_tokens / seconds
        results.append(Result(f"prefill {num_tokens}", value, "tok/s", limit, value / limit))
    for context in contexts:
        for batch in batches:
            bandwidth = read_bandwidth(3)
            seconds = bench.step_s(bench.plan(batch, context, 1), repeats)
            moved = bench.weight_bytes + batch * context * bench.layout.block_bytes / BLOCK_SIZE
            limit = batch * bandwidth / moved
            value = batch / seconds
            results.append(Result(f"decode {batch} at {context}", value, "tok/s", limit, value / limit))
    return results


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="125m", help=f"a model folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--kernels", default="auto", help="backend of the ops: auto, cpu, torch")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 = all cores")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt lengths")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="sequences that decode together")
    parser.add_argument("--context", type=int, nargs="*", default=[256, 2048], help="tokens behind each of them")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = checkpoint(args.model) if args.model in SHAPES else Path(args.model)
    most = max([max(args.batch, default=0) * (c + BLOCK_SIZE) for c in args.context] + args.prefill)
    bench = Bench(folder, DTYPES[args.dtype], args.kernels, most)
    results = run(bench, args.prefill, args.batch, args.context, args.repeats)
    print(f"{args.model} in {args.dtype}, kernels {bench.decoder.kernels.name}, on {machine()}\n")
    print(table(results))
    if args.out:
        write(args.out, results)


if __name__ == "__main__":
    main()
