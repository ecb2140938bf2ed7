"""The results of simulated runs: their figures, a table, and the common format of all benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.rig.markdown import bold, table
from loadtest.rig.results import Result
from loadtest.simulator.request import SimRequest


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets that a request has to meet to count as goodput, seconds."""

    ttft_s: float
    tpot_s: float

    def met_by(self, request: SimRequest) -> bool:
        """Whether the request, which has ended, was served in time."""
        return not request.refused and request.ttft_s <= self.ttft_s and request.tpot_s <= self.tpot_s


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
    good = sum(map(targets.met_by, served))
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


COLUMNS = (
    "req/s", "policy", "goodput", "of offered", "prefix hits", "refused", "of these late", "TTFT p50", "p90",
    "TPOT p90", "prefilled here",
)  # fmt: skip


def outcome_table(loads: Sequence[Sequence[Outcome]]) -> str:
    """A Markdown table, a group of rows for each load; tandem is last in a group, the best value is bold."""
    rows: list[list[str]] = []
    for outcomes in loads:
        goodput = max(outcome.goodput for outcome in outcomes)
        hit_rate = max(outcome.hit_rate for outcome in outcomes)
        for o in outcomes:
            cells = [
                f"{o.offered:.1f}",
                o.policy,
                bold(f"{o.goodput:.2f}", o.goodput == goodput),
                f"{o.good_share:.1%}",
                bold(f"{o.hit_rate:.1%}", o.hit_rate == hit_rate),
                f"{o.refused:.1%}",
                f"{o.refused_late:.1%}",
                f"{o.ttft_p50_s:.2f} s",
                f"{o.ttft_p90_s:.2f} s",
                f"{o.tpot_p90_s * 1e3:.1f} ms",
                f"{o.prefilled_here:.0%}",
            ]
            rows.append(cells)
    return table(COLUMNS, rows, left=(1,))


def results(loads: Sequence[Sequence[Outcome]]) -> list[Result]:
    """Goodput and hit rate of every run; tandem's with the best peer of the same load."""
    rows: list[Result] = []
    for outcomes in loads:
        peers = [outcome for outcome in outcomes if outcome.policy != "tandem"]
        for o in outcomes:
            ours = o.policy == "tandem"
            for what, unit in (("goodput", "req/s"), ("hit_rate", "share")):
                value = float(getattr(o, what))
                best = max(peers, key=lambda peer, what=what: float(getattr(peer, what)), default=None)  # type: ignore[misc]
                peer_value = float(getattr(best, what)) if best is not None else 0.0
                rows.append(
                    Result(
                        f"{o.policy} at {o.offered:.1f} req/s: {what}",
                        value,
                        unit,
                        limit=o.offered if what == "goodput" else None,
                        fraction=o.good_share if what == "goodput" else None,
                        peer=best.policy if ours and best is not None else None,
                        ratio=value / peer_value if ours and peer_value else None,
                    )
                )
    return rows
