"""`python -m services.monitoring` writes dashboard, rules and metrics reference; `--check` fails where one is stale."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from services.monitoring.dashboard import dashboard
from services.monitoring.reference import page
from services.monitoring.rules import rules

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "helm/tandem/files/dashboard.json": dashboard,
    "helm/tandem/files/rules.yaml": rules,
    "docs/metrics.md": page,
}


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Exit status: 0, or 1 where a file is stale."""
    stale = []
    for name, make in FILES.items():
        path, text = root / name, make()
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    for name in stale:
        print(f"{name} is stale: run python -m services.monitoring", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
