"""`python -m loadtest.bench NAME …`: runs one of the benchmarks."""

from __future__ import annotations

from importlib import import_module

import typer

from loadtest.command_line import run

BENCHMARKS = {
    "engine": ("engine.cpu", "Prefill and decode steps on this processor, with its limits."),
    "engine-cuda": ("engine.cuda", "Prefill and decode steps on a GPU, with its limits."),
    "gpu-limits": ("engine.gpu_limits", "A GPU's properties, copy and matrix rates."),
    "gpu-trace": ("engine.gpu_trace", "The kernels of a decode step and a prompt on a GPU."),
    "staging": ("engine.staging", "Blocks between a GPU's pool and host memory."),
    "transfer": ("transfer.measure", "Hand-offs between two processes: what notes, checks and tags cost."),
    "host-time": ("engine.host_time", "What an engine step costs the host, without a GPU."),
    "kernels": ("kernels.measure", "Triton kernels on a GPU, with its limits."),
    "peers": ("peers.measure", "The engine and its peers on the same weights, in turns."),
    "index": ("index.measure", "Match, publish and memory of the block index by its size."),
    "prefix": ("prefix.measure", "Prefix hits of a fleet compared with one ideal cache, and TTFT with the store."),
    "router": ("router.measure", "Latency that a router adds to a request, and its token throughput."),
    "overload": ("router.overload", "A router at three times its workers' capacity."),
    "long-prompt": ("long_prompt.measure", "Effect of long prompts on running answers."),
}
"""Name → module with the command `main`, and its line of help."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tandem's benchmarks; `NAME --help` lists the options of one.",
)


def _add(name: str, module: str, text: str) -> None:
    """Imports the module only when its benchmark runs: those for GPUs need torch, but not Redis or gRPC."""

    @app.command(
        name,
        help=text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def benchmark(context: typer.Context) -> None:
        run(import_module(f"loadtest.bench.{module}").main, context.args, context.command_path)


for _name, (_module, _text) in BENCHMARKS.items():
    _add(_name, _module, _text)

if __name__ == "__main__":
    app(prog_name="python -m loadtest.bench")
