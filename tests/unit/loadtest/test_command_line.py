"""Options as make hands them over, and commands that are found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest

from loadtest.bench.__main__ import BENCHMARKS, main
from loadtest.rig.command_line import Option, Out, call, decimals, integers, names, run
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


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--gpus", "0"], "error: gpus must be at least 1 and at most 8, got 0\n"),
        (["--gpus", "9"], "error: gpus must be at least 1 and at most 8, got 9\n"),
        (["--ttft", "0"], "error: ttft must be above 0, got 0\n"),
        (["--ttft", "nan"], "error: ttft must be above 0, got nan\n"),
        (["--noise", "inf"], "error: noise must be a number, got inf\n"),
        (["--rates", "1", "nan"], "error: --rates: '1 nan' has what is no finite number\n"),
    ],
)
def test_a_number_out_of_bounds_is_one_line_that_names_the_bounds(flags, line, capsys) -> None:
    def command(
        gpus: Annotated[int, Option(at_least=1, at_most=8)] = 4,
        ttft: Annotated[float, Option(above=0)] = 1.0,
        noise: float = 0.0,
        rates: str = "",
    ) -> None:
        assert (gpus, ttft, noise) == (8, 0.5, -1.0)
        decimals(rates, "rates")

    call(command, ["--gpus", "8", "--ttft", "0.5", "--noise", "-1"])
    with pytest.raises(SystemExit) as ended:
        run(command, [*(["--gpus", "8", "--ttft", "0.5", "--noise", "-1"] if flags[0] == "--rates" else []), *flags])
    assert (ended.value.code, capsys.readouterr().err) == (2, line)


def test_results_that_could_not_be_written_end_a_command_before_it_begins(tmp_path: Path) -> None:
    def command(
        out: Out = None,
        traces: Annotated[Path | None, Option(writes="folder")] = None,
        rounds: Annotated[int, Option(at_least=1)] = 1,
    ) -> None:
        begun.append((out, traces))

    begun: list[object] = []
    (tmp_path / "file").touch()
    (tmp_path / "kept.json").touch(0o444)
    for flags in (
        ["--out", str(tmp_path)],
        ["--out", f"{tmp_path}/file/a.json"],
        ["--out", f"{tmp_path}/kept.json"],
        ["--traces", f"{tmp_path}/file"],
    ):
        with pytest.raises(ConfigError, match="cannot be written"):
            call(command, flags)
    places = ["--out", f"{tmp_path}/new/a.json", "--traces", f"{tmp_path}/traces"]
    with pytest.raises(ConfigError, match="rounds must be at least 1"):
        call(command, [*places, "--rounds", "0"])
    assert not begun
    call(command, places)
    assert len(begun) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "kept.json"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out
