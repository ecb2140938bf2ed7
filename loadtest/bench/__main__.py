"""`python -m loadtest.bench NAME …`: runs one of the benchmarks; `NAME --help` lists its options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from loadtest.command_line import run

BENCHMARKS = {
    "engine": ("engine.cpu", "Prefill and decode steps on this processor, with its limits."),
    "step-times": ("engine.mixed", "Steps that decode and compute a chunk at once, and the model that predicts them."),
    "engine-cuda": ("engine.cuda", "Prefill and decode steps on a GPU, with its limits."),
    "gpu-limits": ("kernels.limits", "A GPU's properties, copy and matrix rates."),
    "gpu-trace": ("engine.gpu_trace", "The kernels of a decode step and a prompt on a GPU."),
    "gpu-direct": ("engine.gpu_direct", "Blocks between two processes' pools on a GPU by device pointers."),
    "piecewise": ("engine.piecewise", "Prompts and mixed steps on a GPU, eager and in captured pieces."),
    "staging": ("engine.staging", "Blocks between a GPU's pool and host memory."),
    "kernels": ("kernels.measure", "Triton kernels on a GPU, with its limits."),
    "peers": ("peers.measure", "The engine and its peers on the same weights, in turns."),
    "index": ("index.measure", "Match, publish and memory of the block index by its size."),
    "prefix": ("prefix.measure", "Prefix hits of a fleet compared with one ideal cache, and TTFT with the store."),
    "router": ("router.measure", "Latency that a router adds to a request, and its token throughput."),
    "overload": ("router.overload", "A router at three times its workers' capacity."),
    "parallel": ("parallel.measure", "Sums over ranks beside gloo, and steps of a group beside one process."),
    "long-prompt": ("long_prompt.measure", "Effect of long prompts on running answers."),
}
"""Name → module with the command `main`, and its line of help."""


def main(arguments: Sequence[str]) -> None:
    """Imports the module of a benchmark only to run it: those for GPUs need torch, but not Redis or gRPC."""
    name, *rest = arguments or ["--help"]
    if name not in BENCHMARKS:
        lines = [f"  {known:12} {text}" for known, (_, text) in BENCHMARKS.items()]
        wrong = [] if name in ("--help", "-h") else [f"error: {name!r} is no benchmark"]
        out = sys.stderr if wrong else sys.stdout
        print("usage: python -m loadtest.bench NAME …\n", *lines, *wrong, sep="\n", file=out)
        sys.exit(2 if wrong else 0)
    benchmark = import_module(f"loadtest.bench.{BENCHMARKS[name][0]}").main
    run(benchmark, rest, f"python -m loadtest.bench {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
