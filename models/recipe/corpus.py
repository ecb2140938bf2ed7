"""The training text: the World English Bible (public domain), from the Debian package ``sword-text-web``.

The package holds a SWORD ``zText`` module: per testament a file of zlib blocks (``.bzz``), a block index
(``.bzs``: offset u32, compressed length u32, plain length u32) and a verse index (``.bzv``: block u32, offset
u32, length u16, all little-endian). Verses are OSIS XML fragments, one index entry a verse, with the chapter
and book marks in entries of their own.
"""

import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "sword-text-web"
MODULE_DIR = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
RETOLD = frozenset({"EsthGr", "AddEsth", "DanGr", "AddDan", "1Esd"})  # retell Esther, Daniel, Ezra: would leak

_BOOK = re.compile(r'<div [^>]*osisID="(\w+)" sID=[^>]*type="book"')
_BOOK_NAME = re.compile(r'<milestone n="([^"]+)" type="x-usfm-toc2"/>')
_CHAPTER = re.compile(r'<chapter n="(\w+)" osisID="[\w.]+" sID=')
_DROPPED = re.compile(r"<(note|title|rdg|catchWord)\b[^>]*?(?<!/)>.*?</\1>", re.DOTALL)
_PARAGRAPH = re.compile(r'<div [^>]*type="x-p"[^>]*/>')
_TAG = re.compile(r"<[^>]+>")
_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "—": "-", "–": "-", "…": "..."})


class RecipeError(RuntimeError):
    """The recipe cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Chapter:
    """A chapter: its title ("Genesis 1") and its verses; a newline in front of one opens a paragraph."""

    title: str
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        """Title line, then the verses, paragraphs on lines of their own."""
        return self.title + "\n" + " ".join(self.verses).replace(" \n", "\n").strip()


def fetch(cache_dir: Path) -> tuple[Path, str]:
    """Download and unpack the Debian package into ``cache_dir`` unless it is there already.

    Returns the unpacked root and the package version. Raises RecipeError where apt is absent or fails.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RecipeError(
                f"{tool} not found: the corpus is the Debian package {PACKAGE}, run this on Debian or Ubuntu"
            )
    cache_dir.mkdir(parents=True, exist_ok=True)
    if not list(cache_dir.glob(f"{PACKAGE}_*.deb")):
        _run(["apt-get", "download", PACKAGE], cache_dir)
    deb = sorted(cache_dir.glob(f"{PACKAGE}_*.deb"))[-1]
    root = cache_dir / "unpacked"
    _run(["dpkg-deb", "-x", str(deb), str(root)], cache_dir)
    return root, _run(["dpkg-deb", "-f", str(deb), "Version"], cache_dir).strip()


def read_chapters(root: Path) -> list[Chapter]:
    """All chapters in book order, without notes, headings and the Greek retellings of Esther and Daniel."""
    chapters: list[Chapter] = []
    book, name, number = "", "", ""
    verses: list[str] = []

    def flush() -> None:
        if verses and number and book not in RETOLD:
            chapters.append(Chapter(f"{name} {number}", tuple(verses)))
        verses.clear()

    for testament in ("ot", "nt"):
        for entry in _entries(root / MODULE_DIR, testament):
            if found := _BOOK.search(entry):
                flush()
                book, number = found[1], ""
                name = _BOOK_NAME.findall(entry)[-1]
            if marked := _CHAPTER.search(entry):
                flush()
                number = marked[1]
                entry = entry[marked.end() :].partition(">")[2]
            body, ended, _ = entry.partition("<chapter eID=")
            if number and (verse := plain_text(body)):
                verses.append(verse)
            if ended:
                flush()
                number = ""
        flush()
    return chapters


def plain_text(osis: str) -> str:
    """One OSIS verse as ASCII-quoted plain text; a leading newline marks that a paragraph begins here."""
    opens = bool(_PARAGRAPH.search(osis.partition("<w")[0])) and "sID" in osis.partition("<w")[0]
    text = _TAG.sub("", _PARAGRAPH.sub(" ", _DROPPED.sub(" ", osis)))
    text = re.sub(r"\s+", " ", text.translate(_PLAIN)).strip()
    text = re.sub(r" ([,.;:?!])", r"\1", text)
    return "\n" + text if opens and text else text


def _entries(folder: Path, testament: str) -> list[str]:
    blocks_raw, index, data = ((folder / f"{testament}.{ext}").read_bytes() for ext in ("bzs", "bzv", "bzz"))
    blocks = [zlib.decompress(data[start : start + size]) for start, size, _ in struct.iter_unpack("<III", blocks_raw)]
    out: list[str] = []
    last = (-1, -1)
    for block, start, size in struct.iter_unpack("<IIH", index):
        if size and (block, start) != last:  # merged verses share one entry
            out.append(blocks[block][start : start + size].decode("utf-8"))
            last = (block, start)
    return out


def _run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecipeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
