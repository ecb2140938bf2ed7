"""`tandem fit`: how many GPUs a model needs for a load, before any of them is bought."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shared.errors import ConfigError
from shared.sizing.break_even import break_even
from shared.sizing.degrees import degree_fits
from shared.sizing.devices import gpu_of
from shared.sizing.fit import fit as size_load
from shared.sizing.load import Hardware, Load
from shared.sizing.shapes import NAMED_MODELS, SPARSE_MODELS, ModelShape
from tandem_cli.console import console_of
from tandem_cli.fit.by_trace import TraceOptions, show_trace
from tandem_cli.fit.options import HardwareOptions, LoadOptions, PriceOptions
from tandem_cli.fit.shape import shape_of, uri_of
from tandem_cli.fit.values import not_yet, values_yaml, write_values
from tandem_cli.fit.view import WORKERS_OF_TODAY, as_dict, degrees_as_dict, degrees_table, memory_table, show

_PIPED_WIDTH = 120


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The questions that are answered, and the form and place of the answers."""

    values: Annotated[Path | None, typer.Option("--values", help="Write values for the chart to this file.")] = None
    uri: Annotated[str, typer.Option("--uri", help="model.uri in --values; default: the model's folder.")] = ""
    table: Annotated[
        bool, typer.Option("--table", help="GPUs by memory alone for all named models, with and without shared heads.")
    ] = False
    degrees: Annotated[
        bool,
        typer.Option(
            "--degrees",
            help="What each number of ranks takes in place of the answer: memory of a rank, times, waiting.",
        ),
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False


def fit(
    hardware: HardwareOptions,
    load: LoadOptions,
    prices: PriceOptions,
    answer: AnswerOptions,
    traced: TraceOptions,
    model: Annotated[
        str,
        typer.Argument(
            help=f"Model folder, its config.json, or one of {', '.join(NAMED_MODELS)} (Llama 3.1), "
            f"{', '.join(SPARSE_MODELS)}."
        ),
    ] = "",
) -> None:
    """Say on how many GPUs a model serves a load within its targets, what that costs, and when one pool would do.

    Memory: weights plus the KV of --concurrency sequences of --context tokens. Time: a roofline over the GPU's compute
    and memory bandwidth, and the queue in front of the prefill pool. Exit status 2 and the reason where it cannot fit.

    With --trace and --measured: how the workers of a cluster that runs would serve a trace in each split, by the step
    times that they report, and how far that is from what was measured.
    """
    console = console_of(_PIPED_WIDTH)
    if traced.is_asked:
        content = show_trace(console, traced, load, prices, quiet=answer.as_json)
        if answer.as_json:
            _print_json(content)
    elif answer.table:
        found = memory_table(gpu_of(hardware.gpu, "gpu").memory_bytes)
        _print_json(found.rows) if answer.as_json else console.print(found.render())
    elif not model:
        raise ConfigError("name a model: a folder or one of " + ", ".join(NAMED_MODELS | SPARSE_MODELS), field="model")
    else:
        shape = shape_of(model)
        given = hardware.hardware(shape, prices)
        asked = load.load()
        if answer.degrees:
            _show_degrees(console, shape, asked, given, as_json=answer.as_json)
        else:
            _show_fit(console, model, shape, asked, given, prices, answer)


def _show_fit(
    console: Console,
    model: str,
    shape: ModelShape,
    load: Load,
    hardware: Hardware,
    prices: PriceOptions,
    answer: AnswerOptions,
) -> None:
    found = size_load(shape, load, hardware)
    even = break_even(found)
    if answer.values is not None:
        write_values(answer.values, values_yaml(found, answer.uri or uri_of(model)))
    if answer.as_json:
        _print_json(as_dict(found, model, even, prices.tokens))
        return
    show(console, found, model, even, prices.tokens)
    if answer.values is not None:
        for line in not_yet(found):
            console.print(f"warning: {line}", markup=False)
        console.print(
            f"\nwrote {answer.values}: helm install tandem helm/tandem --values {answer.values}", markup=False
        )


def _show_degrees(console: Console, shape: ModelShape, load: Load, hardware: Hardware, *, as_json: bool) -> None:
    """Prints the degrees on the decode GPU, which is the prefill GPU's too unless another one is named."""
    fits = degree_fits(shape, load, hardware.decode_gpu, hardware)
    if as_json:
        _print_json(degrees_as_dict(fits))
        return
    console.print(degrees_table(fits, hardware.decode_name, load.prompt_len, load.context))
    console.print(f"\n{WORKERS_OF_TODAY}", markup=False)


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=2))
