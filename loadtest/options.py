"""The options that several commands have, each defined once, and the configuration made from them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from loadtest.clients.target import parse_target
from loadtest.config import MAX_SEED, ArrivalKind, LoadConfig, Traffic
from loadtest.rig.command_line import Option
from loadtest.schedule import Limits
from loadtest.slo import parse_duration_s, parse_slo
from loadtest.workloads.spec import describe_workloads
from shared.errors import ConfigError

Slo = Annotated[str | None, Option("targets with units: ttft=200ms,tpot=30ms")]
Duration = Annotated[str | None, Option("how long requests are offered: seconds, or 90s, 5m")]
Scale = Annotated[int, Option("divides a trace's prompt lengths; 32 turns a 512-token block into one of 16")]
Seed = Annotated[int | None, Option("default: random, because the prompts of a reused seed are cached")]
VocabSize = Annotated[int, Option("prompt token ids are below this; at most the model's vocabulary")]


@dataclass(frozen=True)
class RunOptions:
    """What is sent to which target; `run` and `sweep` have all of these."""

    target: Annotated[str, Option("grpc://HOST:PORT or http://HOST:PORT (OpenAI completions)")]
    workload: Annotated[str, Option(f"NAME:field=value,…; with their defaults: {describe_workloads()}")]
    num_requests: Annotated[int | None, Option("maximum number of requests to offer")] = None
    arrivals: Annotated[str | None, Option("poisson, constant, ramp, or trace (default if the workload has times)")] = (
        None
    )
    burstiness: Annotated[float, Option("shape of the gaps' Gamma distribution: 1 = Poisson, below 1 = bursts")] = 1.0
    slice_: Annotated[str, Option("START:END, seconds of the trace", "slice")] = ""
    scale: Scale = 1
    scale_output: Annotated[int | None, Option("divides a trace's answer lengths; default: as --scale")] = None
    seed: Seed = None
    model: Annotated[str, Option("default: the one that the target serves")] = ""
    adapters: Annotated[str, Option("names, of which each conversation asks for one; default: none")] = ""
    adapter_skew: Annotated[float, Option("the n-th adapter is asked for in proportion to 1/n^skew; 0 = all alike")] = (
        0.0
    )
    api_key_file: Annotated[Path | None, Option("file with the API key")] = None
    vocab_size: VocabSize = 1000
    ignore_eos: Annotated[bool, Option("answers have the workload's length, past end-of-sequence tokens")] = True
    request_timeout: Annotated[str, Option("a request without a complete answer after this time has failed")] = "300s"
    give_up: Annotated[str, Option("end the run when the target is gone for this long; 0s = never")] = "5s"
    max_lag: Annotated[
        str | None,
        Option("a run with a p99 schedule lag above this is invalid; default: 5% of TTFT's target, at least 10ms"),
    ] = None
    warmup: Annotated[int, Option("requests sent before the clock starts")] = 1
    label: Annotated[str, Option("name of this run in reports")] = ""

    def config(self, slo: str | None, traffic: Traffic, limits: Limits) -> LoadConfig:
        """The options as one checked value; raises ConfigError naming the option."""
        return LoadConfig(
            target=str(parse_target(self.target)),
            workload=self.workload,
            slo=None if slo is None else parse_slo(slo),
            traffic=traffic,
            limits=limits,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
            slice=self.slice_,
            scale=self.scale,
            scale_output=self.scale if self.scale_output is None else self.scale_output,
            model=self.model,
            adapters=tuple(self.adapters.split()),
            adapter_skew=self.adapter_skew,
            vocab_size=self.vocab_size,
            ignore_eos=self.ignore_eos,
            request_timeout_s=parse_duration_s(self.request_timeout, "request_timeout"),
            give_up_s=parse_duration_s(self.give_up, "give_up"),
            max_lag_ms=None if self.max_lag is None else parse_duration_s(self.max_lag, "max_lag") * 1e3,
            num_warmup=self.warmup,
            label=self.label,
        )

    def traffic(
        self,
        rate: float | None,
        ramp_to: float | None = None,
        speedup: float | None = None,
        concurrency: int | None = None,
    ) -> Traffic:
        """The traffic, which checks the kind of arrivals; raises ConfigError naming the option."""
        return Traffic(cast(ArrivalKind | None, self.arrivals), rate, self.burstiness, ramp_to, speedup, concurrency)

    def limits(self, duration: str | None) -> Limits:
        """The run's limits; raises ConfigError naming the option."""
        return Limits(None if duration is None else duration_s(duration), self.num_requests)

    def api_key(self) -> str:
        """The one line of its file; raises ConfigError (`api_key_file`)."""
        path = self.api_key_file
        if path is None:
            return ""
        try:
            key = path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="api_key_file") from error
        if not key or any(c.isspace() for c in key):
            raise ConfigError(f"{path} must hold one API key", field="api_key_file")
        return key


def duration_s(text: str) -> float:
    """Seconds of `--duration`, where a number without unit is seconds; raises ConfigError (`duration`)."""
    text = text.strip()
    bare = text.replace(".", "", 1).isdecimal()
    return parse_duration_s(f"{text}s" if bare else text, "duration")
