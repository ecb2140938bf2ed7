"""The configuration of one run: frozen, and written into its results so that it can be repeated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from loadtest.arrivals import Arrivals, Constant, Gamma, Ramp
from loadtest.schedule import Limits, Schedule, native_rate, schedule_arrivals, schedule_trace
from loadtest.slo import Slo
from loadtest.workloads.conversation import Workload
from shared.errors import ConfigError

MAX_SEED = (1 << 31) - 1
MAX_SKEW = 10.0

ArrivalKind = Literal["poisson", "constant", "ramp", "trace"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """When requests are sent: an open loop by rate or by a trace's times, or a closed loop of `concurrency` users."""

    arrivals: ArrivalKind | None = None
    """None: a timed workload's own times, else Poisson."""
    rate: float | None = None
    """Requests per second; with a trace's own times it sets the speed-up."""
    burstiness: float = 1.0
    """Shape of the gaps' Gamma distribution; 1 = Poisson."""
    ramp_to: float | None = None
    """Rate at the end of a ramp, requests per second."""
    speedup: float | None = None
    """Speed-up of a trace's own times; 2 replays it twice as fast."""
    concurrency: int | None = None
    """Closed loop with this number of users."""

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            if self.concurrency < 1:
                raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}", field="concurrency")
            if (self.arrivals, self.rate, self.ramp_to, self.speedup) != (None, None, None, None):
                raise ConfigError(
                    "concurrency is a closed loop: it has no rate, arrivals, ramp_to or speedup", field="concurrency"
                )
        if self.arrivals is not None and self.arrivals not in get_args(ArrivalKind):
            kinds = ", ".join(get_args(ArrivalKind))
            raise ConfigError(f"arrivals must be one of {kinds}, got {self.arrivals!r}", field="arrivals")
        if self.rate is not None and self.speedup is not None:
            raise ConfigError("rate and speedup exclude each other: each sets the other", field="speedup")
        if self.ramp_to is not None and self.arrivals not in (None, "ramp"):
            raise ConfigError(f"ramp_to has no meaning with arrivals={self.arrivals}", field="ramp_to")
        kind = self.arrivals if self.ramp_to is None else "ramp"
        if self.burstiness != 1.0 and kind not in (None, "poisson"):
            raise ConfigError(f"burstiness has no meaning with arrivals={kind}", field="burstiness")

    def with_rate(self, rate: float) -> Traffic:
        """The same traffic at a different rate."""
        return replace(self, rate=rate, speedup=None)

    def kind(self, workload: Workload) -> ArrivalKind:
        """The kind of arrivals for `workload`."""
        if self.arrivals is not None:
            return self.arrivals
        if self.ramp_to is not None:
            return "ramp"
        return "trace" if workload.timed and self.burstiness == 1.0 else "poisson"

    def schedule(self, workload: Workload, limits: Limits, seed: int) -> Schedule:
        """The open loop's schedule; raises ConfigError naming the missing or wrong setting."""
        kind = self.kind(workload)
        if kind == "trace":
            speedup = 1.0 if self.speedup is None else self.speedup
            if self.rate is not None:
                _check_rate(self.rate)
                speedup = self.rate / native_rate(workload, seed)
            return schedule_trace(workload, speedup, limits, seed)
        if self.speedup is not None:
            raise ConfigError(f"speedup has no meaning with arrivals={kind}: give a rate", field="speedup")
        if self.rate is None:
            raise ConfigError("rate is missing: requests per second, or concurrency for a closed loop", field="rate")
        if limits.duration_s is None and limits.num_requests is None and not workload.timed:
            raise ConfigError("duration is missing: the workload has no end of its own", field="duration")
        return schedule_arrivals(workload, self._process(kind, workload, limits), limits, seed)

    def _process(self, kind: ArrivalKind, workload: Workload, limits: Limits) -> Arrivals:
        # One arrival starts a whole conversation.
        rate = (self.rate or 0.0) / workload.turns_per_conversation
        if kind == "constant":
            return Constant(rate)
        if kind == "ramp":
            if self.ramp_to is None or limits.duration_s is None:
                raise ConfigError("a ramp needs ramp_to and duration", field="ramp_to")
            return Ramp(rate, self.ramp_to / workload.turns_per_conversation, limits.duration_s)
        return Gamma(rate, self.burstiness, limits.duration_s)


def _check_rate(rate: float) -> None:
    if not rate > 0:
        raise ConfigError(f"rate must be above 0, got {rate:g}", field="rate")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """One run."""

    target: str
    workload: str
    """As `parse_workload` reads it."""
    slo: Slo | None
    traffic: Traffic
    limits: Limits
    seed: int
    slice: str = ""
    """START:END in seconds of the trace."""
    scale: int = 1
    scale_output: int = 1
    model: str = ""
    """Empty: the model that the target serves."""
    adapters: tuple[str, ...] = ()
    """Names of adapters, of which each conversation asks for one; none: all ask for `model`."""
    adapter_skew: float = 0.0
    """The n-th of them is asked for in proportion to 1 / n^skew (Zipf's law); 0 = all alike."""
    vocab_size: int = 1000
    """Prompt token ids are below this; at most the served model's vocabulary."""
    ignore_eos: bool = True
    """Answers have the length given by the workload."""
    request_timeout_s: float = 300.0
    give_up_s: float = 5.0
    """The run ends when the target was unreachable for this long; 0 = never."""
    max_lag_ms: float | None = None
    """A run whose schedule lag is above this at p99 is invalid; None: `lag_limit_ms` sets it."""
    num_warmup: int = 1
    """Requests sent and awaited before the clock starts."""
    label: str = ""
    """Its name in reports."""

    def __post_init__(self) -> None:
        for name, value in (("request_timeout", self.request_timeout_s), ("max_lag", self.max_lag_ms)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value:g}", field=name)
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed must be between 0 and {MAX_SEED}, got {self.seed}", field="seed")
        if not 0 <= self.adapter_skew <= MAX_SKEW:
            raise ConfigError(
                f"adapter_skew must be between 0 and {MAX_SKEW:g}, got {self.adapter_skew:g}", field="adapter_skew"
            )
        for name, whole in (("give_up", self.give_up_s), ("warmup", self.num_warmup)):
            if whole < 0:
                raise ConfigError(f"{name} must be 0 or more, got {whole:g}", field=name)

    @property
    def lag_limit_ms(self) -> float:
        """Limit of schedule lag in milliseconds, above which figures are not trusted: a generator that sends late also
        reads late. By default 5 % of the TTFT target, at least 10."""
        if self.max_lag_ms is not None:
            return self.max_lag_ms
        target_s = self.slo.ttft_s if self.slo is not None else None
        return max(10.0, 0.05 * (target_s or 0.0) * 1e3)

    def as_json(self) -> dict[str, Any]:
        """As JSON for the result files."""
        return asdict(self)
