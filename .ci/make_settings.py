"""Settings on make's command line: one that the target does not take stops make, with the nearest that it takes.

    python .ci/make_settings.py "run" PREFIL    print what is wrong with PREFIL for `make run`, if anything

A target takes what its `##` comment names, such as OUT in OUT=file; every target takes the variables that the Makefile
itself defines, `COMMON`, and the services' environment, `TANDEM_…`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path

MAKEFILE = Path(__file__).resolve().parents[1] / "Makefile"
COMMON = frozenset({"ARGS", "PYTHON", "WHEEL", "KUBEBUILDER_ASSETS", "CXX", "MAKEFLAGS"})
"""What the steps of `make setup` read, and flags for the program behind a target."""
ENVIRONMENT = "TANDEM_"
"""Make exports such a variable, and the services refuse a misspelt one themselves."""


def settings_of(target: str, makefile: str) -> list[str] | None:
    """The settings that a target's comment names, in its order; None for a target without a comment."""
    comment = re.search(rf"^{re.escape(target)}:.*?## (.*)$", makefile, re.MULTILINE)
    return None if comment is None else re.findall(r"\b([A-Z][A-Z0-9_]*)=", comment[1])


def unknown_settings(targets: Sequence[str], given: Collection[str], makefile: str) -> list[str]:
    """One line for each of `given` that none of the targets takes; none where a target's settings are not known."""
    settings = [settings_of(target, makefile) for target in targets]
    taken = [name for names in settings for name in names or ()]
    if not targets or None in settings:
        return []
    known = COMMON.union(taken, re.findall(r"^([A-Z][A-Z0-9_]*) *[:?]?=", makefile, re.MULTILINE))
    return [_refusal(name, targets, taken) for name in given if name not in known and not name.startswith(ENVIRONMENT)]


def _refusal(name: str, targets: Sequence[str], taken: Sequence[str]) -> str:
    nearest = get_close_matches(name.upper(), [*taken, "ARGS"], n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"it takes {', '.join([*taken, 'ARGS'])}"
    return f"{name} is no setting of make {' '.join(targets)}: {hint}"


if __name__ == "__main__":
    print("; ".join(unknown_settings(sys.argv[1].split(), sys.argv[2:], MAKEFILE.read_text(encoding="utf-8"))))
