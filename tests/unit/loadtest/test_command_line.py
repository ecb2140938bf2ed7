"""Options as make hands them over, and commands that are found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest

from loadtest.bench.__main__ import BENCHMARKS, main
from loadtest.rig.command_line import Option, call, integers, names, run
from shared.errors import ConfigError


@pytest.mark.parametrize("flags", [["--workers", "1", "2", "4"], ["--workers", "1 2 4"], ["--workers=1 2 4"]])
def test_a_list_is_quoted_or_not(flags: list[str]) -> None:
    seen: list[object] = []

    def command(
        trace: Annotated[Path, Option()],
        workers: Annotated[str, Option()] = "",
        slice_: Annotated[str, Option(name="slice")] = "",
        resuming: Annotated[bool, Option("keeps 100 % of them")] = True,
    ) -> None:
        seen.extend((trace, integers(workers, "workers"), slice_, resuming))

    call(command, [*flags, "--trace", "a", "--slice", "1:2", "--no-resuming"])
    assert seen == [Path("a"), [1, 2, 4], "1:2", False]
    with pytest.raises(SystemExit):
        call(command, flags)


def test_a_wrong_value_is_one_line_that_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    def command(sizes: Annotated[str, Option()] = "", parts: Annotated[str, Option()] = "") -> None:
        integers(sizes, "sizes")
        names(parts, "parts", ("a", "b"))
        raise ConfigError("no CUDA device")

    for flags, line in (
        (["--sizes", "1", "x"], "error: --sizes: '1 x' is not a list of numbers\n"),
        (["--parts", "a", "c"], "error: --parts: 'c' is not one of a, b\n"),
        ([], "error: no CUDA device\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(command, flags)
        assert (ended.value.code, capsys.readouterr().err) == (2, line)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out
