"""`make test-all`: each part is run and judged, and a further call continues where it stopped."""

from __future__ import annotations

from tests.all import PARTS, ROOT


def test_every_part_has_its_paths_and_every_folder_its_part() -> None:
    for part in PARTS:
        assert all((ROOT / path).exists() for path in (*part.paths, *part.without)), part.name
    covered = {path for part in PARTS for path in part.paths if part.name != "default"}
    left_out = {"clients", "gpu", "image", "neon"}
    """Tests of their own commands: they need what not every machine has."""
    for folder in (ROOT / "tests").iterdir():
        if list(folder.glob("**/test_*.py")) and folder.name not in left_out:
            assert any(path.startswith(f"tests/{folder.name}") for path in covered), folder.name
