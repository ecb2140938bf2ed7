"""`python -m loadtest`: the commands and their options."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from loadtest import options
from loadtest.baseline.cli import baseline
from loadtest.commands import EXIT_REFUSED, run_command, sweep_command
from loadtest.rate_search import SearchSpace
from shared.errors import ConfigError, TandemError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Open-loop load tests with TTFT/TPOT goodput.",
)


@app.command(epilog=options.WORKLOADS_HELP)
def run(
    target: options.Target,
    workload: options.WorkloadSpec,
    out: options.Out,
    slo: options.OptionalSlo = None,
    rate: options.Rate = None,
    duration: options.Duration = None,
    num_requests: options.NumRequests = None,
    concurrency: options.Concurrency = None,
    arrivals: options.Arrivals = None,
    burstiness: options.Burstiness = 1.0,
    ramp_to: options.RampTo = None,
    speedup: options.Speedup = None,
    slice_: options.Slice = "",
    scale: options.Scale = 1,
    scale_output: options.ScaleOutput = None,
    seed: options.Seed = None,
    model: options.Model = "",
    api_key_file: options.ApiKeyFile = None,
    vocab_size: options.VocabSize = 1000,
    ignore_eos: options.IgnoreEos = True,
    request_timeout: options.RequestTimeout = "300s",
    give_up: options.GiveUp = "5s",
    max_lag: options.MaxLag = None,
    warmup: options.Warmup = 1,
    label: options.Label = "",
) -> None:
    """Offer one workload once, and report latency and goodput."""
    config = options.make_config(
        target=target,
        workload=workload,
        slo=slo,
        traffic=options.make_traffic(arrivals, rate, burstiness, ramp_to, speedup, concurrency),
        limits=options.make_limits(duration, num_requests),
        seed=seed,
        slice_=slice_,
        scale=scale,
        scale_output=scale_output,
        model=model,
        vocab_size=vocab_size,
        ignore_eos=ignore_eos,
        request_timeout=request_timeout,
        give_up=give_up,
        max_lag=max_lag,
        warmup=warmup,
        label=label,
    )
    raise typer.Exit(run_command(config, out, options.read_api_key(api_key_file), Console()))


@app.command(epilog=options.WORKLOADS_HELP)
def sweep(
    target: options.Target,
    workload: options.WorkloadSpec,
    slo: options.SloSpec,
    out: options.Out,
    duration: options.Duration = "60s",
    num_requests: options.NumRequests = None,
    rate: Annotated[float, typer.Option(help="first rate of the search, requests per second")] = 1.0,
    rate_min: Annotated[float, typer.Option(help="lowest rate of the search")] = 0.05,
    rate_max: Annotated[float, typer.Option(help="highest rate of the search")] = 1000.0,
    rates: Annotated[str, typer.Option(help="measure these instead of searching: 1,2,4")] = "",
    attainment: Annotated[float, typer.Option(help="percent of the offered requests that must be good")] = 90.0,
    tolerance: Annotated[float, typer.Option(help="percent by which the result may be below the true limit")] = 10.0,
    max_points: Annotated[int, typer.Option(help="maximum number of rates to measure")] = 12,
    arrivals: options.Arrivals = None,
    burstiness: options.Burstiness = 1.0,
    slice_: options.Slice = "",
    scale: options.Scale = 1,
    scale_output: options.ScaleOutput = None,
    seed: options.Seed = None,
    model: options.Model = "",
    api_key_file: options.ApiKeyFile = None,
    vocab_size: options.VocabSize = 1000,
    ignore_eos: options.IgnoreEos = True,
    request_timeout: options.RequestTimeout = "300s",
    give_up: options.GiveUp = "5s",
    max_lag: options.MaxLag = None,
    warmup: options.Warmup = 1,
    label: options.Label = "",
) -> None:
    """Find the maximum goodput: the highest rate at which enough requests meet both targets."""
    space = SearchSpace(rate, rate_min, rate_max, attainment / 100, tolerance / 100, max_points)
    config = options.make_config(
        target=target,
        workload=workload,
        slo=slo,
        traffic=options.make_traffic(arrivals, rate, burstiness, None, None, None),
        limits=options.make_limits(duration, num_requests),
        seed=seed,
        slice_=slice_,
        scale=scale,
        scale_output=scale_output,
        model=model,
        vocab_size=vocab_size,
        ignore_eos=ignore_eos,
        request_timeout=request_timeout,
        give_up=give_up,
        max_lag=max_lag,
        warmup=warmup,
        label=label,
    )
    api_key = options.read_api_key(api_key_file)
    raise typer.Exit(sweep_command(config, space, _rates(rates), out, api_key, Console()))


app.command()(baseline)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"rates={text}: expected numbers such as 1,2,4", field="rates") from None
    if any(not 0 < rate < 1e6 for rate in rates):
        raise ConfigError(f"rates={text}: each must be above 0", field="rates")
    return sorted(set(rates))


def main() -> None:
    """The process's entry point: an error that the user can fix is one line on stderr and status 2."""
    try:
        app()
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
