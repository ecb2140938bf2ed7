"""Rooms depend on each other in one direction: no circle of imports between neighbours in a folder."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    path.relative_to(ROOT).as_posix()
    for top in ("shared", "services")
    for path in (ROOT / top, *(ROOT / top).rglob("*"))
    if (path / "__init__.py").exists() and "pb" not in path.parts
)
GENERATED = "shared/rpc/pb"
"""Messages and stubs: plain definitions, which rooms below shared/rpc use too."""


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, at its top or within a function: modules, or names within them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module: str) -> PurePosixPath | None:
    """The file that defines the module, or the name within one; None outside shared/ and services/."""
    parts = module.split(".")
    if parts[0] not in ("shared", "services"):
        return None
    for end in (len(parts), len(parts) - 1):
        place = PurePosixPath(*parts[:end])
        if (ROOT / place).is_dir() and end == len(parts):
            return place / "__init__.py"
        if (ROOT / f"{place}.py").exists():
            return PurePosixPath(f"{place}.py")
    return PurePosixPath(*parts[:-1]) / "__init__.py"


@pytest.fixture(scope="module")
def imports() -> list[tuple[PurePosixPath, PurePosixPath]]:
    """(importing file, imported file), without the `__main__.py` of services, which put a process together."""
    found = []
    for top in ("shared", "services"):
        for path in (ROOT / top).rglob("*.py"):
            own = PurePosixPath(path.relative_to(ROOT).as_posix())
            if not own.is_relative_to(GENERATED) and own.name != "__main__.py":
                found += [(own, file) for module in imported_modules(path) if (file := file_of(module)) is not None]
    assert len(found) > 1000
    return found


def neighbours(folder: str, imports: list[tuple[PurePosixPath, PurePosixPath]]) -> Mapping[str, set[str]]:
    """Which of its own entries, files or folders, each entry of the folder imports."""
    depth, graph = len(PurePosixPath(folder).parts), defaultdict[str, set[str]](set)
    for own, other in imports:
        if own.is_relative_to(folder) and other.is_relative_to(folder) and not other.is_relative_to(GENERATED):
            pair = own.parts[depth], other.parts[depth]
            if "__init__.py" not in pair and pair[0] != pair[1]:
                graph[pair[0]].add(pair[1])
    return graph


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_circle_between_neighbours(folder: str, imports: list[tuple[PurePosixPath, PurePosixPath]]) -> None:
    try:
        TopologicalSorter(neighbours(folder, imports)).prepare()
    except CycleError as error:
        pytest.fail(f"in {folder}, each is imported by the next: {' -> '.join(error.args[1])}")
