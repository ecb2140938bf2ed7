"""`make test-all`: each part is run and judged, and a further call continues where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.environment import check_variables
from tests.all import PARTS, ROOT, Part, main
from tests.examples import ALL


def test_every_part_has_its_paths_and_every_folder_its_part() -> None:
    for part in PARTS:
        assert all((ROOT / path).exists() for path in (*part.paths, *part.without)), part.name
    covered = {path for part in PARTS for path in part.paths if part.name != "default"}
    left_out = {"clients", "gpu", "image", "neon"}
    """Tests of their own commands: they need what not every machine has."""
    for folder in (ROOT / "tests").iterdir():
        if list(folder.glob("**/test_*.py")) and folder.name not in left_out:
            assert any(path.startswith(f"tests/{folder.name}") for path in covered), folder.name


def test_services_take_the_environment_of_tests_that_draw_all_examples() -> None:
    check_variables((), ALL)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_part_that_failed_continues_with_the_tests_that_have_not_passed(tmp_path: Path, processes: int) -> None:
    (tmp_path / "test_two.py").write_text(f"""
import pathlib
folder = pathlib.Path({str(tmp_path)!r})
def ran(name):
    with (folder / name).open("a") as times:
        times.write("x")
def test_passes():
    ran("passes")
def test_passes_later():
    ran("later")
    assert (folder / "mended").exists()
""")
    part, state = [Part("two", (str(tmp_path),), marks="")], tmp_path / "state" / "all.json"
    arguments = ["--processes", str(processes), "-c", str(ROOT / "pyproject.toml")]
    assert main(arguments, part, state) == 1
    (tmp_path / "mended").touch()
    assert main([*arguments, "--continue"], part, state) == 0
    assert main([*arguments, "--continue"], part, state) == 0
    assert [len((tmp_path / name).read_text()) for name in ("passes", "later")] == [1, 2]
    assert main(arguments, part, state) == 0
    assert [len((tmp_path / name).read_text()) for name in ("passes", "later")] == [2, 3]
