"""The results of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.simulator.request import SimRequest


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets that a request has to meet to count as goodput, seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one policy at one load."""

    policy: str
    offered: float
    """Requests/s."""
    goodput: float
    """Requests/s that met both targets."""
    hit_rate: float
    """Prompt tokens that were not computed, over the tokens of all started prompts."""
    refused: float
    """Refused share of the requests."""
    refused_late: float
    """Share of the refusals that came after a wait."""
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    prefilled_here: float
    """Share of the started requests whose decode worker computed the prompt."""
    wall_s: float
    """Wall-clock time of the simulation."""

    @property
    def good_share(self) -> float:
        """Goodput over offered rate."""
        return self.goodput / self.offered


def summarize(policy: str, requests: Sequence[SimRequest], targets: Targets, wall_s: float) -> Outcome:
    """All requests must have ended."""
    span_s = max(requests[-1].at_s - requests[0].at_s, 1e-9)
    served = [request for request in requests if not request.refused]
    refused = [request for request in requests if request.refused]
    good = sum(request.ttft_s <= targets.ttft_s and request.tpot_s <= targets.tpot_s for request in served)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in served)
    ttft_s = np.array([request.ttft_s for request in served] or [0.0])
    tpot_s = np.array([request.tpot_s for request in served if request.num_output_tokens > 1] or [0.0])
    return Outcome(
        policy,
        offered=len(requests) / span_s,
        goodput=good / span_s,
        hit_rate=sum(request.num_cached_tokens for request in served) / max(1, num_prompt_tokens),
        refused=len(refused) / len(requests),
        refused_late=sum(request.refused_s > request.at_s for request in refused) / max(1, len(refused)),
        ttft_p50_s=float(np.quantile(ttft_s, 0.5)),
        ttft_p90_s=float(np.quantile(ttft_s, 0.9)),
        tpot_p90_s=float(np.quantile(tpot_s, 0.9)),
        prefilled_here=sum(request.prefilled_here for request in served) / max(1, len(served)),
        wall_s=wall_s,
    )
