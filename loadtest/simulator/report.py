"""The simulator's table, and the same figures in the common format of all benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.figures import Result
from loadtest.markdown import bold, table
from loadtest.simulator.outcome import Outcome

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
