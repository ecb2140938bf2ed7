"""`python -m loadtest.bench NAME …`: runs one of the benchmarks; `NAME --help` lists its options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loadtest.rig.command_line import Command, run_one_of


def _benchmark(module: str, text: str) -> Command:
    return Command(f"loadtest.bench.{module}:main", text)


BENCHMARKS = {
    "engine": _benchmark("engine.cpu", "Prefill and decode steps on this processor, with its limits."),
    "lora": _benchmark("engine.lora", "Steps with adapters beside those of the base model alone, in turns."),
    "step-times": _benchmark("engine.mixed", "Steps that decode and compute a chunk at once, beside their model."),
    "engine-cuda": _benchmark("engine.cuda", "Prefill and decode steps on a GPU, with its limits."),
    "gpu-limits": _benchmark("kernels.limits", "A GPU's properties, copy and matrix rates."),
    "gpu-trace": _benchmark("engine.gpu_trace", "The kernels of a decode step and a prompt on a GPU."),
    "gpu-direct": _benchmark("engine.gpu_direct", "Blocks between two processes' pools on a GPU by device pointers."),
    "gpu-handoff": _benchmark("handoff", "What a long prompt's request waits for its hand-off, two workers on a GPU."),
    "cluster-smoke": _benchmark("cluster_smoke", "A whole cluster on this machine, two workers, gives one answer."),
    "piecewise": _benchmark("engine.piecewise", "Prompts and mixed steps on a GPU, eager and in captured pieces."),
    "staging": _benchmark("engine.staging", "Blocks between a GPU's pool and host memory."),
    "kernels": _benchmark("kernels.measure", "Triton kernels on a GPU, with its limits."),
    "peers": _benchmark("peers.measure", "The engine and its peers on the same weights, in turns."),
    "eval": _benchmark("quality.measure", "Perplexity of a model in fewer bits, and its distance from the plain one."),
    "quant": _benchmark("peers.quant", "Weights in fewer bits beside plain ones and beside peers, in turns."),
    "speculation": _benchmark("speculation.measure", "Answers with guesses beside the same answers without."),
    "speculation-peers": _benchmark("speculation.peers", "What guesses gain here and in peers, in turns."),
    "index": _benchmark("index.measure", "Match, publish and memory of the block index by its size."),
    "prefix": _benchmark("prefix.measure", "Prefix hits of a fleet beside one ideal cache, and TTFT with the store."),
    "agents": _benchmark("prefix.agents", "What agents find again of their conversations, beside a clairvoyant pool."),
    "router": _benchmark("router.measure", "Latency that a router adds to a request, and its token throughput."),
    "overload": _benchmark("router.overload", "A router at three times its workers' capacity."),
    "parallel": _benchmark("parallel.measure", "Sums over ranks beside gloo, and steps of a group beside one process."),
    "long-prompt": _benchmark("long_prompt.measure", "Effect of long prompts on running answers."),
}


def main(arguments: Sequence[str]) -> None:
    """Imports the module of a benchmark only to run it: those for GPUs need torch, but not Redis or gRPC."""
    run_one_of(BENCHMARKS, arguments, "python -m loadtest.bench")


if __name__ == "__main__":
    main(sys.argv[1:])
