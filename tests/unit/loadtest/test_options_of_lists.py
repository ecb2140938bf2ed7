"""List options as make hands them over, and commands that are found by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import pytest
import typer

from loadtest.bench.__main__ import BENCHMARKS, PLAIN, main
from loadtest.command_line import call, decimals, integers, names, run
from shared.errors import ConfigError


@pytest.mark.parametrize("flags", [["--workers", "1", "2", "4"], ["--workers", "1 2 4"], ["--workers=1 2 4"]])
def test_a_list_is_quoted_or_not(flags: list[str]) -> None:
    seen: list[object] = []

    def command(workers: Annotated[str, typer.Option()], seed: Annotated[int, typer.Option()] = 0) -> None:
        seen.extend((integers(workers, "workers"), seed))

    call(command, [*flags, "--seed", "3"])
    assert seen == [[1, 2, 4], 3]


def test_an_empty_list_is_a_list() -> None:
    assert (integers("", "x"), decimals("1 2.5", "x"), names("b a", "x", ("a", "b"))) == ([], [1.0, 2.5], ["b", "a"])


def test_a_wrong_value_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    def command(sizes: Annotated[str, typer.Option()] = "", parts: Annotated[str, typer.Option()] = "") -> None:
        integers(sizes, "sizes")
        names(parts, "parts", ("a", "b"))

    for flags, option in ((["--sizes", "1", "x"], "--sizes"), (["--parts", "a", "c"], "--parts")):
        with pytest.raises(SystemExit) as ended:
            call(command, flags)
        assert ended.value.code == 2
        assert option in capsys.readouterr().err


def test_an_error_that_the_user_can_act_on_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise ConfigError("no CUDA device")

    with pytest.raises(SystemExit) as ended:
        run(command, [])
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: no CUDA device\n")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) if name in PLAIN else nullcontext():
        main([name, "--help"])
    assert "--out" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such"])
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert printed.endswith("error: 'no-such' is no benchmark\n")
    assert all(name in printed for name in BENCHMARKS)
