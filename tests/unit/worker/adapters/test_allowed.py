"""What a client names as an adapter's folder: nothing outside the allowed ones is opened, whatever links lead there."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.adapters.adapter_pool import AdapterPool
from services.worker.adapters.slots import SlotTable
from shared.errors import InvalidRequest, ModelLoadError
from shared.kernels.lora.step import LoadedAdapter
from shared.model.adapters.adapter import read_adapter
from shared.model.adapters.random_adapter import write_random_adapter
from tests.unit.model.adapters.test_reading import CONFIG
from tests.waiting import DEADLINE_S

PARTS = ("allowed", "secret", "a", "out", "file-out", "in", "loop", "..", ".", "", "b", "\0", "x" * 300, "~", "a\n")
_opened: list[list[str]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened and isinstance(arguments[0], str | Path):
        _opened[-1].append(str(arguments[0]))


sys.addaudithook(_audit)  # cannot be taken back: it does nothing outside `opened`


@contextmanager
def opened() -> Iterator[list[str]]:
    """The paths that are opened meanwhile."""
    _opened.append([])
    try:
        yield _opened[-1]
    finally:
        _opened.pop()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An allowed folder with an adapter, and links from it to a secret one, in all ways."""
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    write_random_adapter(allowed / "a", CONFIG, rank=1, targets=["q_proj"])
    write_random_adapter(secret, CONFIG, rank=1, targets=["q_proj"], seed=1)
    write_random_adapter(secret / "a", CONFIG, rank=1, targets=["q_proj"], seed=2)
    (allowed / "out").symlink_to(secret)
    (allowed / "in").symlink_to("a")
    (allowed / "loop").symlink_to("loop")
    for kind, files in (
        ("file-out", ("adapter_config.json", "adapter_model.safetensors")),
        ("b", ("adapter_model.safetensors",)),
    ):
        (allowed / kind).mkdir()
        for path in (allowed / "a").iterdir():
            target = secret / path.name if path.name in files else path
            (allowed / kind / path.name).symlink_to(target)
    return tmp_path


def pool_of(root: Path) -> AdapterPool:
    def read(folder: Path) -> LoadedAdapter:
        raise AssertionError(folder)

    return AdapterPool(read, lambda slot, packed: None, SlotTable(1, 1), (root,))


def _real(paths: list[str]) -> set[str]:
    return {os.path.realpath(path) for path in set(paths)}


async def test_files_that_are_links_out_of_the_folders_are_refused(tree: Path) -> None:
    pool = pool_of(tree / "allowed")
    assert pool.allowed(str(tree / "allowed" / "in")) == tree / "allowed" / "a"
    for name in ("file-out", "b"):
        with pytest.raises(InvalidRequest, match="is a link out of"):
            pool.allowed(str(tree / "allowed" / name))
    await pool.close()


async def test_a_folder_that_leads_elsewhere_when_it_is_read_again_opens_nothing_outside(tree: Path) -> None:
    def read(folder: Path) -> LoadedAdapter:
        packed: Any = SimpleNamespace(nbytes=1)
        return LoadedAdapter(read_adapter(folder, CONFIG).digest, 1, packed, 1)

    secret, own = tree / "secret", tree / "allowed" / "a"
    pool = AdapterPool(read, lambda slot, packed: None, SlotTable(1, 1), (tree / "allowed",))
    known = await pool.stage(pool.allowed(str(own)), is_given=True)
    await pool.stage(pool.allowed(str(write_random_adapter(own.parent / "c", CONFIG, rank=1))), is_given=True)
    assert known.digest not in pool.resident
    weights = own / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(secret / "adapter_model.safetensors")
    with opened() as paths:
        lease = pool.hold(known.digest)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ModelLoadError, match="link out of the worker's adapter_folders"):
                await lease.ready()
            with pytest.raises(InvalidRequest, match="link out of"):
                await pool.stage(own, is_given=True)
    assert not _real(paths) & {str(path) for path in secret.rglob("*")}
    await pool.close()


async def test_a_file_that_is_a_link_to_itself_is_refused(tree: Path) -> None:
    weights = tree / "allowed" / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(weights.name)
    pool = pool_of(tree / "allowed")
    with pytest.raises(InvalidRequest, match="lora_path is no path"):
        pool.allowed(str(weights.parent))
    await pool.close()


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_no_path_opens_anything_outside(tree: Path, count: int) -> None:
    pool, draw = pool_of(tree / "allowed"), random.Random(11)
    read = refused = 0
    secret = [str(path) for path in (tree / "secret").rglob("*")]
    with opened() as paths:
        for _ in range(count):
            parts = [draw.choice(PARTS) for _ in range(draw.randint(0, 5))]
            begin = draw.choice([str(tree), str(tree / "allowed"), str(tree / "allowed"), "", "/", "//"])
            try:
                read_adapter(pool.allowed(draw.choice(["/", "//", "/./"]).join([begin, *parts])), CONFIG)
                read += 1
            except (InvalidRequest, ModelLoadError):
                refused += 1
    assert read > count / 100
    assert refused > count / 2
    assert len(paths) >= 2 * read, "the hook sees what is opened"
    assert not _real(paths) & {*secret}
    await pool.close()
