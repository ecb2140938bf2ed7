"""The workloads of a study, and each window's requests: the same ones at the same times for every system."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from loadtest.config import MAX_SEED, LoadConfig, Traffic
from loadtest.rig.results import write_text
from loadtest.run import Plan, plan_run
from loadtest.schedule import Limits, Schedule
from loadtest.slo import Slo
from loadtest.workloads.tokens import TokenSource
from loadtest.workloads.trace import BLOCK_LEN
from shared.errors import ConfigError

WORKLOADS = {
    "balanced": "random:input=64-256,output=12-36",
    "prefill-heavy": "random:input=256-768,output=4-12",
    "decode-heavy": "random:input=16-64,output=48-96",
}
"""By their names: short enough for the demo model and for hundreds of requests a cell on two slow cores."""
OF_GUESSES = {
    "edit": "copies:input=96-160,output=32-64,run=12-36,share=1",
    "chat": "copies:input=48-128,output=32-64,run=2-3,share=0.16",
}
"""Of workers that guess. In the texts of `loadtest.bench.speculation` an edited file is copied in runs of some dozen
tokens; an answer of a chat has a guess at a tenth of its places, of which a third is right, as it is here."""
_REQUEST_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class WindowSize:
    """How many requests a window has: at least this number, and as many as come in this time."""

    num_requests: int
    least_s: float

    def seconds(self, rate: float) -> float:
        """How long requests are offered at a rate."""
        return max(self.num_requests, math.ceil(rate * self.least_s - 1e-9)) / rate


def parse_workloads(text: str) -> dict[str, str]:
    """Names of WORKLOADS and OF_GUESSES, or NAME=SPEC for others; raises ConfigError (`workloads`)."""
    known = WORKLOADS | OF_GUESSES
    found: dict[str, str] = {}
    for part in text.split():
        name, _, spec = part.partition("=")
        if not name.replace("-", "").isalnum() or not (spec or name in known):
            raise ConfigError(
                f"workloads: {part!r} is neither one of {', '.join(known)} nor NAME=SPEC, as in "
                "chat=lognormal:input=512~0.7,output=64~0.7",
                field="workloads",
            )
        if found.setdefault(name, spec or known[name]) != (spec or known[name]):
            raise ConfigError(f"workloads: {name} is named twice, as different ones", field="workloads")
    if not found:
        raise ConfigError("workloads: name at least one", field="workloads")
    return found


def run_config(spec: str, slo: Slo | None, traffic: Traffic, limits: Limits, seed: int, vocab_size: int) -> LoadConfig:
    """A run without a target."""
    return LoadConfig(
        target="",
        workload=spec,
        slo=slo,
        traffic=traffic,
        limits=limits,
        seed=seed,
        vocab_size=vocab_size,
        request_timeout_s=_REQUEST_TIMEOUT_S,
    )


def window_plan(spec: str, slo: Slo, rate: float, size: WindowSize, seed: int, vocab_size: int) -> Plan:
    """The requests of one window: Poisson arrivals, exactly as many as the rate says."""
    limits = Limits(duration_s=size.seconds(rate))
    return plan_run(run_config(spec, slo, Traffic(arrivals="poisson", rate=rate), limits, seed, vocab_size))


def with_other_prompts(plan: Plan, seed: int) -> Plan:
    """The same requests with tokens of their own: a cluster that gets them a second time has none of them cached."""
    return Plan(plan.config, plan.workload, TokenSource(seed, plan.config.vocab_size), plan.schedule)


def seed_of(*parts: object) -> int:
    """A seed that is a function of what it is for."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def write_trace(path: Path, schedule: Schedule) -> None:
    """A window's requests as Mooncake's JSON lines, which the simulator reads. Raises ConfigError (`traces`) for
    conversations of several turns, whose later arrivals no schedule knows."""
    numbers, lines = count(), []
    for due in schedule.entries:
        if len(due.conversation.turns) > 1:
            raise ConfigError("traces: conversations of several turns have no trace", field="traces")
        [turn] = due.conversation.turns
        line = {
            "timestamp": round(1e3 * due.at_s, 3),
            "input_length": turn.num_new_tokens,
            "output_length": turn.num_output_tokens,
            # No two are equal: unrelated prompts.
            "hash_ids": [next(numbers) for _ in range(-(-turn.num_new_tokens // BLOCK_LEN))],
        }
        lines.append(json.dumps(line) + "\n")
    write_text(path, "".join(lines))
