"""The command line's options, each defined once, and the configuration made from them."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import typer

from loadtest.clients.target import parse_target
from loadtest.config import MAX_SEED, ArrivalKind, LoadConfig, Traffic
from loadtest.schedule import Limits
from loadtest.slo import parse_duration_s, parse_slo
from loadtest.workloads.spec import describe_workloads
from shared.errors import ConfigError

Target = Annotated[str, typer.Option(help="grpc://HOST:PORT or http://HOST:PORT (OpenAI completions)")]
WorkloadSpec = Annotated[str, typer.Option(help="NAME:field=value,…; see the list below")]
SloSpec = Annotated[str, typer.Option("--slo", help="targets with units: ttft=200ms,tpot=30ms")]
OptionalSlo = Annotated[str | None, typer.Option("--slo", help="targets with units: ttft=200ms,tpot=30ms")]
Rate = Annotated[float | None, typer.Option(help="requests per second; scales a trace's own times")]
Arrivals = Annotated[
    str | None, typer.Option(help="poisson, constant, ramp, or trace (default if the workload has times)")
]
Burstiness = Annotated[float, typer.Option(help="shape of the gaps' Gamma distribution: 1 = Poisson, below 1 = bursts")]
RampTo = Annotated[float | None, typer.Option(help="rate at the end of a ramp over --duration")]
Speedup = Annotated[float | None, typer.Option(help="replays a trace this many times as fast")]
Concurrency = Annotated[int | None, typer.Option(help="closed loop: number of users, each waiting for its answer")]
Duration = Annotated[str | None, typer.Option(help="how long requests are offered: seconds, or 90s, 5m")]
NumRequests = Annotated[int | None, typer.Option(help="maximum number of requests to offer")]
Slice = Annotated[str, typer.Option("--slice", help="START:END, seconds of the trace")]
Scale = Annotated[int, typer.Option(help="divides a trace's prompt lengths; 32 turns a 512-token block into one of 16")]
ScaleOutput = Annotated[int | None, typer.Option(help="divides a trace's answer lengths; default: as --scale")]
Seed = Annotated[int | None, typer.Option(help="default: random, because the prompts of a reused seed are cached")]
Out = Annotated[Path, typer.Option(help="folder for the results")]
Model = Annotated[str, typer.Option(help="default: the one that the target serves")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="file with the API key")]
VocabSize = Annotated[int, typer.Option(help="prompt token ids are below this; at most the model's vocabulary")]
IgnoreEos = Annotated[bool, typer.Option(help="answers have the workload's length, past end-of-sequence tokens")]
RequestTimeout = Annotated[str, typer.Option(help="a request without a complete answer after this time has failed")]
GiveUp = Annotated[str, typer.Option(help="end the run when the target is gone for this long; 0s = never")]
MaxLag = Annotated[
    str | None,
    typer.Option(help="a run with a p99 schedule lag above this is invalid  [default: 5% of TTFT's target, ≥ 10ms]"),
]
Warmup = Annotated[int, typer.Option(help="requests sent before the clock starts")]
Label = Annotated[str, typer.Option(help="name of this run in reports")]

WORKLOADS_HELP = "Workloads (the values shown are the defaults):\n\n\b\n" + describe_workloads()


def make_config(
    *,
    target: str,
    workload: str,
    slo: str | None,
    traffic: Traffic,
    limits: Limits,
    seed: int | None,
    slice_: str,
    scale: int,
    scale_output: int | None,
    model: str,
    vocab_size: int,
    ignore_eos: bool,
    request_timeout: str,
    give_up: str,
    max_lag: str | None,
    warmup: int,
    label: str,
) -> LoadConfig:
    """The options as one checked value; raises ConfigError naming the option."""
    return LoadConfig(
        target=str(parse_target(target)),
        workload=workload,
        slo=None if slo is None else parse_slo(slo),
        traffic=traffic,
        limits=limits,
        seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
        slice=slice_,
        scale=scale,
        scale_output=scale if scale_output is None else scale_output,
        model=model,
        vocab_size=vocab_size,
        ignore_eos=ignore_eos,
        request_timeout_s=parse_duration_s(request_timeout, "request_timeout"),
        give_up_s=parse_duration_s(give_up, "give_up"),
        max_lag_ms=None if max_lag is None else parse_duration_s(max_lag, "max_lag") * 1e3,
        num_warmup=warmup,
        label=label,
    )


def make_traffic(
    arrivals: str | None,
    rate: float | None,
    burstiness: float,
    ramp_to: float | None,
    speedup: float | None,
    concurrency: int | None,
) -> Traffic:
    """The traffic; raises ConfigError naming the option."""
    # Traffic checks the value itself.
    return Traffic(cast(ArrivalKind | None, arrivals), rate, burstiness, ramp_to, speedup, concurrency)


def make_limits(duration: str | None, num_requests: int | None) -> Limits:
    """The run's limits; a number without unit is seconds. Raises ConfigError naming the option."""
    if duration is None:
        return Limits(None, num_requests)
    text = duration.strip()
    bare = text.replace(".", "", 1).isdecimal()
    return Limits(parse_duration_s(f"{text}s" if bare else text, "duration"), num_requests)


def read_api_key(path: Path | None) -> str:
    """The file's one line; raises ConfigError (`api_key_file`)."""
    if path is None:
        return ""
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="api_key_file") from error
    if not key or any(c.isspace() for c in key):
        raise ConfigError(f"{path} must hold one API key", field="api_key_file")
    return key


def with_seed(config: LoadConfig, seed: int) -> LoadConfig:
    """The same run with another seed."""
    return replace(config, seed=seed)
