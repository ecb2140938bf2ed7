"""The command in this process, against a scripted router."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tandem_cli.main import main
from tests.unit.cli.scripted_router import ScriptedRouter


@dataclass
class Result:
    """What a command did."""

    status: int
    out: str
    err: str


RunTandem = Callable[..., Result]


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    scripted = ScriptedRouter()
    yield scripted
    scripted.close()


@pytest.fixture
def tandem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: ScriptedRouter) -> RunTandem:
    """Runs `tandem ARGS…` with `router` as the target that the environment names."""
    monkeypatch.setenv("TANDEM_TARGET", router.target)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        piped = io.StringIO(stdin) if isinstance(stdin, str) else io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
        monkeypatch.setattr(sys, "stdin", piped)
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Result(int(caught.value.code or 0), captured.out, captured.err)

    return run
