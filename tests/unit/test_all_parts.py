"""`make test-all`: each part is run and judged, and a further call goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.all import PARTS, ROOT, Part


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


def test_every_part_has_its_paths_and_every_folder_its_part() -> None:
    for part in PARTS:
        assert all((ROOT / path).exists() for path in (*part.paths, *part.without)), part.name
    covered = {path for part in PARTS for path in part.paths if part.name != "default"}
    left_out = {"clients", "gpu", "image", "neon"}
    """Tests of their own commands: they need what not every machine has."""
    for folder in (ROOT / "tests").iterdir():
        if list(folder.glob("**/test_*.py")) and folder.name not in left_out:
            assert any(path.startswith(f"tests/{folder.name}") for path in covered), folder.name
