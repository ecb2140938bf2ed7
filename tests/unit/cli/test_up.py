"""The options of tandem serve, and the command itself."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from services.local.commands import TandemCommands, plan_workers
from services.local.spec import DEMO_MODEL, ClusterOptions, ClusterSpec
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.cores.core_choice import CoreShare
from shared.errors import InvalidRequest, Unauthenticated
from shared.identity import WorkerRole
from shared.model.ranks.shard import Degrees
from shared.settings.group import option_names
from tandem_cli import up
from tandem_cli.main import DISTRIBUTION
from tests.unit.cli.conftest import Result, RunTandem
from tests.unit.cli.scripted_router import ScriptedRouter


class Recorded:
    """In Foreground's place: keeps the specification."""

    spec: ClusterSpec

    def __init__(self, spec: ClusterSpec, console: object, *, example: bool) -> None:
        Recorded.spec, Recorded.example = spec, example

    async def run(self) -> int:
        return 0


@pytest.fixture
def serve(tandem: RunTandem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(up, "Foreground", Recorded)

    def run(text: str, *flags: str) -> Result:
        (tmp_path / "cluster.yaml").write_text(text)
        return tandem("serve", "--config", str(tmp_path / "cluster.yaml"), *flags)

    return run


def test_no_command_waits_for_torch() -> None:
    """Loading it takes longer than all the rest of a command."""
    code = "import sys, tandem_cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_files_options_count_where_no_flag_does(serve: Any) -> None:
    text = "http: 127.0.0.1:9000\nnum-kv-blocks: 77\nrouters: 2\nexample: false\nmode: collocated\n"
    result = serve(text, "--routers", "3")
    assert result.status == 0, result.err
    spec = Recorded.spec
    assert (spec.http, spec.num_kv_blocks, spec.num_routers, spec.mode) == ("127.0.0.1:9000", 77, 3, "collocated")
    assert (spec.num_prefill, spec.model, Recorded.example) == (0, DEMO_MODEL, False)


USUAL = {"speculation": "off", "dtype": "auto", "block_encryption": "none", "num_kv_blocks": "0", "max_model_len": "0"}
"""Options given as their defaults."""


@pytest.mark.parametrize("in_file", [False, True])
def test_an_option_goes_before_the_environment_also_as_its_default(
    serve: Any, in_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_WORKER_SPECULATION", "ngram")
    monkeypatch.setenv("TANDEM_WORKER_DTYPE", "bf16")
    flags = [part for name, value in USUAL.items() for part in (f"--{name.replace('_', '-')}", value)]
    text = "".join(f"{name}: {value}\n" for name, value in USUAL.items()).replace("off", "'off'")
    assert serve(text if in_file else "{}", *([] if in_file else flags)).status == 0
    assert {name: str(value) for name, value in worker_settings().items() if name in USUAL} == USUAL
    assert serve("{}").status == 0
    assert worker_settings()["speculation"] == "ngram"
    assert serve("models: [{model: a, dtype: auto}, {model: b}, {model: c, dtype: auto}]\n").status == 0
    assert [worker_settings(number)["dtype"] for number in (0, 2, 4)] == ["auto", "bf16", "auto"]


def worker_settings(number: int = 0) -> dict[str, Any]:
    """What a worker of the recorded cluster would read."""
    spec = Recorded.spec
    plan = plan_workers(spec, [CoreShare((), 1)] * spec.num_processes)[number]
    command = TandemCommands(spec).worker(plan, "127.0.0.1:1")
    return load_settings(WorkerSettings, command[3:]).model_dump()


def test_the_model_is_an_argument_or_a_flag(serve: Any) -> None:
    for flags in (["mine"], ["--model", "mine"], ["mine", "--decode", "2"]):
        assert serve("model: theirs\n", *flags).status == 0
        assert Recorded.spec.model == Path("mine")
    assert serve("model: theirs\n").status == 0
    assert Recorded.spec.model == Path("theirs")


def test_degrees_of_the_pools(serve: Any) -> None:
    assert serve("tp: 4\nep: 2\n", "--prefill-tp", "2", "--decode-ep", "4").status == 0
    spec = Recorded.spec
    assert spec.degrees(WorkerRole.PREFILL) == Degrees(2, 1, 2)
    assert spec.degrees(WorkerRole.DECODE) == Degrees(4, 1, 4)


def test_workers_do_both_unless_prefill_workers_are_to_differ(serve: Any) -> None:
    assert serve("prefill: 2\n").status == 0
    assert (Recorded.spec.mode, [name for _, name in Recorded.spec.pools[0].workers]) == (
        "auto",
        ["worker-0", "worker-1", "worker-2"],
    )
    unequal = (["--prefill-tp", "2"], ["--decode-tp", "2"], ["--prefill-ep", "2"])
    for flags in (*unequal, ["--kv-dtype", "int8", "--prefill-kv-dtype", "bf16"]):
        assert serve("tp: 4\nep: 4\n", *flags).status == 0
        assert Recorded.spec.mode == "disaggregated"
        assert serve("tp: 4\nep: 4\nmodels: [{model: a}]\n", *flags).status == (2 if "bf16" in flags else 0)
        assert Recorded.spec.mode == "disaggregated"
    assert serve("tp: 4\n", "--decode-tp", "4").status == 0
    assert Recorded.spec.mode == "auto"
    refused = serve("mode: auto\n", "--prefill-tp", "2")
    assert (refused.status, "prefill_tp is set, but no worker is a prefill worker" in refused.err) == (2, True)
    several = "models: [{model: a}, {model: b, kv_dtype: int8, prefill_kv_dtype: fp32}]\n"
    assert serve(several).status == 0
    assert [pools.mode for pools in Recorded.spec.pools] == ["auto", "disaggregated"]


def test_models_of_the_file(serve: Any) -> None:
    result = serve("models:\n- {model: a, name: x, decode: 2, aliases: [y]}\n- {model: b, mode: collocated}\n")
    assert result.status == 0, result.err
    first, second = Recorded.spec.pools
    assert (first.name, first.model, first.aliases, first.num_prefill, first.num_decode) == (
        "x",
        Path("a"),
        ("y",),
        1,
        2,
    )
    assert (second.name, second.num_prefill, second.workers[0][1]) == ("b", 0, "b-decode-0")


@pytest.mark.parametrize(
    ("text", "flags", "why"),
    [
        ("models: [{model: a}]", ["--prefill", "2"], "--prefill is for one model, and the file of --config names"),
        ("models: [{model: a}]", ["b"], "a model is given, and the file of --config names its models"),
        ("routers: 1", ["a", "--model", "b"], "the model is given twice: 'a' and --model 'b'"),
        ("prefil: 2", [], "prefil is no option of tandem serve: did you mean prefill?"),
        ("routers: many", [], "Invalid value for '--routers'"),
        (
            "models: [{model: a, mode: disaggregated, prefill: 0}]",
            [],
            "prefill must be between 1 and 64 in disaggregated mode, got 0",
        ),
        (
            "prefill_tp: 2",
            ["--prefill", "0"],
            "prefill must be between 1 and 64 where prefill_tp makes prefill workers differ, got 0",
        ),
    ],
)
def test_what_is_wrong_in_the_file(serve: Any, text: str, flags: list[str], why: str) -> None:
    result = serve(text, *flags)
    assert result.status == 2
    assert why in result.err


def test_every_option_has_the_help_of_its_setting(tandem: RunTandem) -> None:
    text = " ".join(tandem("serve", "--help").out.split())
    for option, name in option_names(ClusterOptions).items():
        description = ClusterOptions.model_fields[name].description
        assert description
        assert f"--{option.replace('_', '-')} " in text
        assert " ".join(description.split()) in text


def test_the_version(tandem: RunTandem) -> None:
    result = tandem("--version")
    assert (result.status, result.out) == (0, f"tandem {metadata.version(DISTRIBUTION)}\n")


def test_serve_and_up_are_one_command(tandem: RunTandem) -> None:
    help_of = {name: tandem(name, "--help").out.replace(f"tandem {name} ", "tandem X ") for name in ("serve", "up")}
    assert help_of["serve"] == help_of["up"]
    assert "--state-dir" in help_of["up"]


def test_completion_can_be_shown(tandem: RunTandem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = tandem("--show-completion", "bash")
    assert result.status == 0
    assert "_TANDEM_COMPLETE" in result.out


@pytest.mark.parametrize("command", ["status", "generate"])
def test_without_a_key_the_flag_is_named_and_the_status_is_2(
    tandem: RunTandem, router: ScriptedRouter, command: str
) -> None:
    router.responses = []
    router.error = Unauthenticated("an API key is needed: send `Authorization: Bearer KEY`", field="authorization")
    result = tandem(command, *(["x"] if command == "generate" else []))
    assert result.status == 2
    assert "tandem: an API key is needed: give it with --api-key, or in TANDEM_API_KEY" in result.err
    assert "Bearer" not in result.err


def test_a_fields_flag_is_named(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.responses = []
    router.error = InvalidRequest("max_tokens must be at least 1, got 0", field="max_tokens")
    result = tandem("generate", "x", "-n", "0")
    assert result.status == 2
    assert "max_tokens must be at least 1, got 0 (--max-tokens)" in result.err


def test_a_local_settings_flag_is_named(tandem: RunTandem) -> None:
    result = tandem("serve", "--num-kv-blocks", "-1")
    assert result.status == 2
    assert "num_kv_blocks: Input should be greater than or equal to 0 (got -1)" in result.err
    assert "(--num-kv-blocks)" in result.err


def test_a_misspelt_variable_of_the_commands_own(tandem: RunTandem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_APIKEY", "k")
    result = tandem("status")
    assert (result.status, result.out) == (2, "")
    assert result.err == "tandem: environment variable TANDEM_APIKEY is no setting: did you mean TANDEM_API_KEY?\n"


def test_a_folder_that_cannot_be_written_gets_a_sentence(tandem: RunTandem, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    free = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    result = tandem("serve", "--state-dir", str(tmp_path / "file" / "state"), *free)
    assert result.status == 2
    assert result.err.endswith("name a folder that you may write to, or start in one (--state-dir)\n")
    assert "Traceback" not in result.err
