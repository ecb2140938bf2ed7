"""`python -m loadtest.chaos`: faults in a real cluster under streams; `soak` kills a part again and again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, get_args

from loadtest.chaos.network import enter
from loadtest.chaos.report import Row, RowFile, summary
from loadtest.chaos.run import Chaos
from loadtest.chaos.trial import Outcome, trials
from loadtest.rig.command_line import Option, choice, run
from loadtest.rig.results import commit, write_text
from shared.errors import ConfigError
from shared.settings.common import SpeculationMode

Model = Annotated[Path, Option(help="model folder; the prompts are the demo model's token ids")]


def main(
    only: Annotated[str, Option(help='trials with these words: "decode SIGKILL, router"; empty = all')] = "",
    out: Annotated[
        Path | None, Option(help="file for the result lines; the table goes beside it", writes="file")
    ] = None,
    model: Model = Path("models/demo"),
    folder: Annotated[Path, Option(help="where logs go")] = Path(".tandem/chaos"),
    resuming: Annotated[bool, Option(help="clients ask again where their connection broke")] = True,
    speculation: Annotated[str, Option(help="of the workers: off, ngram or auto")] = "off",
    go_on: Annotated[
        bool, Option(name="continue", help="keep the rows in OUT, and run the trials without one")
    ] = False,
) -> None:
    """VICTIM FAULT PHASE: lost|wrong|leaked|longest pause, a line a trial. Status 1 where it was more than a pause.

    Partitions need network namespaces: root, `ip`, `unshare` and `nsenter`.
    """
    choice(speculation, "speculation", get_args(SpeculationMode))
    todo = trials(only)
    if not todo:
        raise ConfigError(f"no trial has the words {only!r}", field="only")
    if go_on and out is None:
        raise ConfigError("--continue needs --out, which has the rows to keep", field="out")
    file = RowFile(out) if out is not None else None
    rows = file.rows() if file is not None and go_on else []
    kept = {row.outcome.trial for row in rows}
    todo = [trial for trial in todo if trial not in kept]
    if any(trial.needs_network for trial in todo):
        enter("loadtest.chaos")
    if file is not None and not go_on:
        file.clear()
    code = commit()

    def on_outcome(outcome: Outcome, took_s: float) -> None:
        rows.append(Row(outcome, code, took_s))
        print(outcome, flush=True)
        if outcome.note:
            print(f"  {outcome.note}", file=sys.stderr, flush=True)
        if file is not None:
            file.add(rows[-1])

    asyncio.run(Chaos(model, folder, resuming=resuming, speculation=speculation).run(todo, on_outcome))
    text = summary(rows)
    print(f"\n{text}")
    if file is not None:
        write_text(file.table, f"{text}\n")
    if not all(row.outcome.good for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    run(main, name="python -m loadtest.chaos")
