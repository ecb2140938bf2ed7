"""`python -m loadtest.chaos`: faults in a real cluster under streams; `soak` kills a part again and again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from loadtest.chaos.network import enter
from loadtest.chaos.report import summary
from loadtest.chaos.run import Chaos
from loadtest.chaos.trial import Outcome, trials
from loadtest.command_line import run
from shared.errors import ConfigError

Model = Annotated[Path, typer.Option(help="model folder; the prompts are the demo model's token ids")]


def main(
    only: Annotated[str, typer.Option(help='trials with these words: "decode SIGKILL, router"; empty = all')] = "",
    out: Annotated[Path | None, typer.Option(help="file for the result lines; the table goes beside it")] = None,
    model: Model = Path("models/demo"),
    folder: Annotated[Path, typer.Option(help="where logs go")] = Path(".tandem/chaos"),
    resuming: Annotated[bool, typer.Option(help="clients ask again where their connection broke")] = True,
) -> None:
    """VICTIM FAULT PHASE: lost|wrong|leaked|longest pause, a line a trial. Status 1 where it was more than a pause.

    Partitions need network namespaces: root, `ip`, `unshare` and `nsenter`.
    """
    todo = trials(only)
    if not todo:
        raise ConfigError(f"no trial has the words {only!r}", field="only")
    if any(trial.needs_network for trial in todo):
        enter("loadtest.chaos")
    if out is not None:
        out.write_text("")
    outcomes: list[Outcome] = []

    def on_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(outcome, flush=True)
        if outcome.note:
            print(f"  {outcome.note}", file=sys.stderr, flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(f"{outcome}\n")

    asyncio.run(Chaos(model, folder, resuming=resuming).run(todo, on_outcome))
    text = summary(outcomes)
    print(f"\n{text}")
    if out is not None:
        out.with_name(f"{out.stem}-table.md").write_text(f"{text}\n")
    if not all(outcome.good for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    run(main, name="python -m loadtest.chaos")
