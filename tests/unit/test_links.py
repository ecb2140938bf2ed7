"""What the pages point to is there: linked files and headings, and the files of the tree that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for room in ("docs", "helm", "loadtest") for page in ROOT.glob(f"{room}/**/*.md"))]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:services|shared|loadtest|tests|docs|proto|models|\.ci)/[\w./-]+)`")


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
    for room in ("services", "shared", "loadtest", "tandem"):
        for file in (ROOT / room).rglob("*.py"):
            for page, number in cited.findall(file.read_text(encoding="utf-8")):
                target = ROOT / "docs" / "decisions" / page
                if not target.exists() or f"\n## {number} " not in target.read_text(encoding="utf-8"):
                    wrong.append(f"{file.relative_to(ROOT)}: {page}, {number}")
    assert not wrong
