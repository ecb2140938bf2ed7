"""Command lines without typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest

from loadtest.plain_options import Option, Out, call, integers, run
from shared.errors import ConfigError

Seen = list[tuple[object, ...]]


@pytest.fixture
def seen() -> Seen:
    return []


def take(flags: list[str], seen: Seen) -> None:
    def command(
        batch: Annotated[str, Option("sequences")] = "64 256",
        most_tokens: Annotated[int, Option()] = 7,
        tune: Annotated[bool, Option()] = False,
        out: Out = None,
    ) -> None:
        """What it does."""
        seen.append((batch, most_tokens, tune, out))

    call(command, flags, "prog")


def test_options_have_the_names_types_and_defaults_of_the_parameters(seen: Seen) -> None:
    take([], seen)
    take(["--batch", "1", "2", "--most-tokens", "9", "--tune", "--out", "a/b.json"], seen)
    take(["--batch=1 2"], seen)
    assert seen == [
        ("64 256", 7, False, None),
        ("1 2", 9, True, Path("a/b.json")),
        ("1 2", 7, False, None),
    ]


@pytest.mark.parametrize("flags", [["--no-such"], ["--most-tokens", "many"], ["loose"]])
def test_a_wrong_option_ends_with_status_2_and_names_it(
    flags: list[str], seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        take(flags, seen)
    assert (ended.value.code, seen) == (2, [])
    assert flags[0] in capsys.readouterr().err


def test_help_is_the_docstring_and_the_options(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        take(["--help"], seen)
    text = capsys.readouterr().out
    assert all(part in text for part in ("What it does.", "--batch", "sequences", "--out", "results as JSON"))


def test_an_error_that_the_user_can_act_on_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        integers("1 x", "batch")

    with pytest.raises(SystemExit) as ended:
        run(command, [])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --batch: '1 x' is not a list of whole numbers\n"
    with pytest.raises(ConfigError) as caught:
        integers("1 x", "batch")
    assert caught.value.field == "batch"
