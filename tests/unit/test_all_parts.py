"""`make test-all`: each part is run and judged, and a further call goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.all import PARTS, ROOT, Part, chosen, main


@pytest.fixture
def tests(tmp_path: Path) -> list[Part]:
    """Two parts: one passes, the other fails as long as there is no file `mended`."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_sound.py").write_text(
        f"from pathlib import Path\ndef test(): Path({str(tmp_path / 'runs')!r}).open('a').write('x')\n"
    )
    (tmp_path / "test_broken.py").write_text(
        f"from pathlib import Path\ndef test(): assert Path({str(tmp_path / 'mended')!r}).exists()\n"
    )
    return [
        Part(
            name,
            ("--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path / f"test_{name}.py")),
            "",
        )
        for name in ("broken", "sound")
    ]


def test_a_failed_part_is_named_the_others_run_and_a_second_call_runs_it_alone(
    tmp_path: Path, tests: list[Part], capfd: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "out" / "state.json"
    flags = ["--processes", "1", "-p", "no:cacheprovider"]
    assert main(flags, tests, state) == 1
    table = capfd.readouterr().out.splitlines()[-2:]
    assert [line.split()[:2] for line in table] == [["broken", "failed"], ["sound", "passed"]]
    assert [row["part"] for row in json.loads(state.read_text())] == ["broken", "sound"]
    assert main(flags, tests[1:], state) == 0
    assert (tmp_path / "runs").read_text() == "xx", "without --continue all that is asked for runs"
    (tmp_path / "mended").touch()
    assert main(["--continue", *flags], tests, state) == 0
    assert (tmp_path / "runs").read_text() == "xx", "what had passed was not run again"


def test_a_part_of_which_further_arguments_leave_nothing_has_not_failed(tmp_path: Path, tests: list[Part]) -> None:
    none = ["--processes", "1", "-p", "no:cacheprovider", "-k", "nothing_is_named_so"]
    assert main(none, tests, tmp_path / "state.json") == 0


def test_parts_are_chosen_by_their_names() -> None:
    assert [part.name for part in chosen("e2e, chaos", False)] == ["e2e", "chaos"]
    assert "k8s" not in {part.name for part in chosen("", False)}
    assert chosen("", True) == list(PARTS)
    with pytest.raises(ValueError, match="no part nothing; there are default"):
        chosen("nothing", False)


def test_every_part_has_its_paths_and_every_folder_its_part() -> None:
    for part in PARTS:
        assert all((ROOT / path).exists() for path in (*part.paths, *part.without)), part.name
    covered = {path for part in PARTS for path in part.paths if part.name != "default"}
    left_out = {"clients", "gpu", "image", "neon"}
    """Tests of their own commands: they need what not every machine has."""
    for folder in (ROOT / "tests").iterdir():
        if list(folder.glob("**/test_*.py")) and folder.name not in left_out:
            assert any(path.startswith(f"tests/{folder.name}") for path in covered), folder.name
