"""The outcomes as one table in Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from string import ascii_lowercase

from loadtest.chaos.rows import Row
from loadtest.chaos.trial import PHASES, Outcome
from loadtest.markdown import bold, table


def summary(rows: Sequence[Row]) -> str:
    """A line for each victim and fault, a column a phase; what is more than a pause stands out, and so does a row that
    is of another commit than most."""
    outcomes = [row.outcome for row in rows]
    lines = dict.fromkeys((outcome.trial.victim, outcome.trial.fault) for outcome in outcomes)
    found = {(row.outcome.trial.victim, row.outcome.trial.fault, row.outcome.trial.phase): row for row in rows}
    marks = _marks(rows)
    cells = [[*line, *(_cell(found.get((*line, phase)), marks) for phase in PHASES)] for line in lines]
    num_good = sum(outcome.good for outcome in outcomes)
    return "\n".join(
        (
            table(("victim", "fault", *PHASES), cells, left=(0, 1)),
            "",
            "Each cell: streams lost, streams with a wrong token, KV blocks leaked, longest pause of a client. "
            f"{num_good} of {len(outcomes)} trials cost no more than a pause.",
            *_commits(rows, marks),
            *_notes(outcomes),
            *_seconds(rows),
        )
    )


def _marks(rows: Iterable[Row]) -> Mapping[str, str]:
    """A mark for each commit: none for the one of most rows."""
    counts = Counter(row.commit for row in rows).most_common()
    letters = [f"({letter})" for letter in ascii_lowercase]
    return {commit: mark for (commit, _), mark in zip(counts, ["", *letters, *("(…)" for _ in counts)], strict=False)}


def _cell(row: Row | None, marks: Mapping[str, str]) -> str:
    if row is None:
        return ""
    outcome = row.outcome
    text = f"{outcome.lost} / {outcome.wrong} / {outcome.leaked} / {outcome.longest_pause_s:.1f} s"
    return " ".join(filter(None, (bold(text, not outcome.good), marks[row.commit])))


def _commits(rows: Sequence[Row], marks: Mapping[str, str]) -> list[str]:
    counts = Counter(row.commit for row in rows)
    named = [
        f"- {' '.join(filter(None, (mark, commit or 'commit not recorded')))}: {counts[commit]} trials"
        for commit, mark in marks.items()
    ]
    return ["", "Code, by commit (+: with changes that are in no commit):", "", *named] if any(counts) else []


def _notes(outcomes: Iterable[Outcome]) -> list[str]:
    noted = [f"- {outcome.trial}: {outcome.note}" for outcome in outcomes if outcome.note]
    return ["", *noted] if noted else []


def _seconds(rows: Iterable[Row]) -> list[str]:
    taken: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.took_s:
            taken[row.outcome.trial.fault].append(row.took_s)
    said = ", ".join(f"{fault} {median(times):.0f}" for fault, times in taken.items())
    return ["", f"Seconds a trial, median: {said}."] if said else []
