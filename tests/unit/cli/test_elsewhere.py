"""Flags of other servers, which `tandem serve` refuses with what takes their place here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from tandem_cli.elsewhere import OURS
from tandem_cli.main import build_app
from tests.unit.cli.conftest import RunTandem

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def own() -> set[str]:
    """The options of `tandem serve`."""
    group = typer.main.get_command(build_app())
    assert isinstance(group, TyperGroup)
    return {flag for parameter in group.commands["serve"].params for flag in parameter.opts}


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--max-num-seqs", "set TANDEM_WORKER_MAX_NUM_SEQS"),
        ("--tensor_parallel_size=2", "use --tp"),
        ("--enable-auto-tool-choice", "it is always on, leave it out"),
        ("-tp", "use --tp"),
    ],
)
def test_a_flag_of_another_server_is_refused_with_ours(tandem: RunTandem, flag: str, ours: str) -> None:
    result = tandem("serve", "some-model", flag, "4")
    assert result.status == 2
    name = flag.partition("=")[0].replace("_", "-")
    assert result.err == f"tandem: {name} is no option of tandem serve: {ours}\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--dtype", "bfloat16"), "--dtype bfloat16 is not known here: use bf16"),
        (("--quantization=awq",), "--quantization awq is not known here: leave it out"),
    ],
)
def test_a_value_of_another_server_is_refused_with_ours(tandem: RunTandem, given: tuple[str, ...], said: str) -> None:
    result = tandem("serve", "some-model", *given)
    assert result.status == 2
    assert result.err.startswith(f"tandem: {said}")


def test_what_is_named_in_their_place_exists(own: set[str]) -> None:
    assert not own & set(OURS)
    settings = set(re.findall(r"`(TANDEM_[A-Z_]+)`", (DOCS / "reference.md").read_text()))
    for answer in OURS.values():
        assert set(re.findall(r"--[a-z-]+", answer)) <= own, answer
        assert set(re.findall(r"TANDEM_[A-Z_]+", answer)) <= settings, answer


def test_each_flag_of_the_guides_table_is_answered(own: set[str]) -> None:
    text = (DOCS / "coming-from.md").read_text()
    table = text.partition("## Flags: vLLM and SGLang")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `--")]
    flags = {flag for row in rows for cell in row for flag in re.findall(r"`(--[a-z-]+)", cell)}
    assert len(flags) >= 60
    of_the_gateway = {"--tls-cert-path", "--tls-key-path"}
    assert flags - own - of_the_gateway <= set(OURS)
