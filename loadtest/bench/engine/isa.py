"""Steps of the engine with each instruction set and dtype in turns: what a processor with less loses, and which dtype is
the faster one. `python -m loadtest.bench.engine.isa --model 125m`
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from loadtest.bench.engine.cpu import DTYPES, Bench, Step
from loadtest.bench.shapes import SHAPES, checkpoint
from loadtest.figures import machine
from shared.kernels.cpu import isa

STEPS = (Step(1, 0, 512), Step(1, 0, 2048), Step(1, 256, 1), Step(8, 256, 1), Step(32, 256, 1))


def rates(benches: Sequence[Bench], steps: Sequence[Step], rounds: int) -> list[list[list[float]]]:
    """Tokens a second, [step][bench][round]: a round goes through all benches, since a shared machine drifts."""
    found: list[list[list[float]]] = []
    for step in steps:
        tokens, repeats = step.batch * step.count, 1 if step.count > 1 else 5
        plans = [bench.plan(step.batch, step.start, step.count) for bench in benches]
        found.append([[] for _ in benches])
        for _ in range(rounds):
            for bench, plan, of_bench in zip(benches, plans, found[-1], strict=True):
                of_bench.append(tokens / bench.step_s(plan, repeats))
    return found


def row(name: str, of_step: Sequence[Sequence[float]]) -> str:
    """Median tokens a second of each bench, and median of its ratios to the first one, round by round."""
    cells = []
    for of_bench in of_step:
        ratio = median(ours / first for ours, first in zip(of_bench, of_step[0], strict=True))
        cells.append(f"{median(of_bench):,.0f} ({ratio:.2f})")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table in Markdown."""
    features = isa.processor_features()
    runnable = [each.name for each in isa.BUILT if not each.missing(features)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="125m", help=f"a model folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--isa", nargs="*", default=runnable, help="instruction sets, the first to be compared with")
    parser.add_argument("--dtype", nargs="*", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--torch", action="store_true", help="the torch kernels too")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 = all cores")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = checkpoint(args.model) if args.model in SHAPES else Path(args.model)
    kernels = [*(f"cpu:{name}" for name in args.isa), *(["torch"] if args.torch else [])]
    kinds = [(name, dtype) for dtype in args.dtype for name in kernels]
    room = max(step.num_kv_tokens for step in STEPS)
    benches = [Bench(folder, DTYPES[dtype], name, room) for name, dtype in kinds]
    print(f"{args.model} on {machine()}, {torch.get_num_threads()} threads; tok/s (ratio to the first)\n")
    print(f"| | {' | '.join(f'{name} {dtype}' for name, dtype in kinds)} |")
    print(f"| --- |{' ---: |' * len(kinds)}")
    for step, of_step in zip(STEPS, rates(benches, STEPS, args.rounds), strict=True):
        print(row(step.name, of_step), flush=True)


if __name__ == "__main__":
    main()
