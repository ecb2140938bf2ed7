"""The repository: imports without circles, links that resolve, tests without plugins."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
TOPS = ("shared", "services", "tandem", "loadtest", "tandem_cli")
FOLDERS = sorted(
    path.relative_to(ROOT).as_posix()
    for top in TOPS
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
    """The file that defines the module, or the name within one; None outside the product's folders."""
    parts = module.split(".")
    if parts[0] not in TOPS:
        return None
    for end in (len(parts), len(parts) - 1):
        place = PurePosixPath(*parts[:end])
        if (ROOT / place).is_dir() and end == len(parts):
            return place / "__init__.py"
        if (ROOT / f"{place}.py").exists():
            return PurePosixPath(f"{place}.py")
    return PurePosixPath(*parts[:-1]) / "__init__.py"


def imports() -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """(importing file, imported file), without the `__main__.py` of services, which put a process together."""
    for top in TOPS:
        for path in (ROOT / top).rglob("*.py"):
            own = PurePosixPath(path.relative_to(ROOT).as_posix())
            if not own.is_relative_to(GENERATED) and own.name != "__main__.py":
                yield from ((own, file) for module in imported_modules(path) if (file := file_of(module)) is not None)


@pytest.fixture(scope="module")
def neighbours() -> Mapping[str, Mapping[str, set[str]]]:
    """By folder: which of its own entries, files or folders, each entry of the folder imports."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for own, other in imports():
        if own != other and not other.is_relative_to(GENERATED):
            depth = next(i for i, pair in enumerate(zip(own.parts, other.parts, strict=False)) if pair[0] != pair[1])
            if "__init__.py" not in (own.parts[depth], other.parts[depth]):
                found["/".join(own.parts[:depth]) or "."][own.parts[depth]].add(other.parts[depth])
    assert len(found) > 80
    return found


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_no_circle_between_neighbours(folder: str, neighbours: Mapping[str, Mapping[str, set[str]]]) -> None:
    try:
        TopologicalSorter(neighbours.get(folder, {})).prepare()
    except CycleError as error:
        pytest.fail(f"in {folder}, each is imported by the next: {' -> '.join(error.args[1])}")


PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for room in ("docs", "helm", "loadtest") for page in ROOT.glob(f"{room}/**/*.md"))]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:services|shared|loadtest|tandem|tandem_cli|tests|docs|proto|models|\.ci)/[\w./-]+)`")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a forge makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_resolves(page: Path) -> None:
    missing = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = [path for path in FILE.findall(prose(page)) if "NAME" not in path]  # NAME: a file that a change would add
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_index_of_decisions_lists_each_once() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(
        r"\[(\d{4})\]\((\S+)#\1-", (folder / "README.md").read_text(encoding="utf-8").partition("Superseded")[0]
    )
    headings = [
        (number, page.name)
        for page in folder.glob("*.md")
        for number in re.findall(r"^## (\d{4}) ", prose(page), re.MULTILINE)
    ]
    assert sorted(listed) == sorted(headings)
    assert len({number for number, _ in listed}) == len(listed)


def test_code_cites_decisions_where_they_stand() -> None:
    cited = re.compile(r"docs/decisions/([\w-]+\.md), (\d{4})")
    wrong = []
    for room in TOPS:
        for file in (ROOT / room).rglob("*.py"):
            for page, number in cited.findall(file.read_text(encoding="utf-8")):
                target = ROOT / "docs" / "decisions" / page
                if not target.exists() or f"\n## {number} " not in target.read_text(encoding="utf-8"):
                    wrong.append(f"{file.relative_to(ROOT)}: {page}, {number}")
    assert not wrong


ABSENT = (
    "ucxx", "redis", "msgspec", "pydantic", "pydantic_settings", "opentelemetry", "grpc", "google", "yaml", "typer",
    "rich", "psutil", "hypothesis", "pytest_asyncio", "pytest_timeout", "xdist", "transformers", "tokenizers",
    "uvloop", "starlette", "llguidance", "huggingface_hub",
)  # fmt: skip
REFUSING = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_they_are_collected_without_plugins_and_without_the_services_packages(tmp_path: Path) -> None:
    (tmp_path / "absent.py").write_text(REFUSING)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "absent",
        "-q",
        "-c",
        "tests/gpu/pytest.ini",
        "-m",
        "gpu",
        "tests/gpu",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or " skipped" in done.stdout
