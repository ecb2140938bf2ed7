"""The outcomes as one table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadtest.chaos.trial import PHASES, Outcome
from loadtest.markdown import bold, table


def summary(outcomes: Sequence[Outcome]) -> str:
    """A row for each victim and fault, a column a phase; what is more than a pause stands out."""
    rows = dict.fromkeys((outcome.trial.victim, outcome.trial.fault) for outcome in outcomes)
    found = {(o.trial.victim, o.trial.fault, o.trial.phase): o for o in outcomes}
    cells = [[*row, *(_cell(found.get((*row, phase))) for phase in PHASES)] for row in rows]
    num_good = sum(outcome.good for outcome in outcomes)
    return "\n".join(
        (
            table(("victim", "fault", *PHASES), cells, left=(0, 1)),
            "",
            "Each cell: streams lost, streams with a wrong token, KV blocks leaked, longest pause of a client. "
            f"{num_good} of {len(outcomes)} trials cost no more than a pause.",
            *_notes(outcomes),
        )
    )


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    text = f"{outcome.lost} / {outcome.wrong} / {outcome.leaked} / {outcome.longest_pause_s:.1f} s"
    return bold(text, not outcome.good)


def _notes(outcomes: Iterable[Outcome]) -> list[str]:
    noted = [f"- {outcome.trial}: {outcome.note}" for outcome in outcomes if outcome.note]
    return ["", *noted] if noted else []
