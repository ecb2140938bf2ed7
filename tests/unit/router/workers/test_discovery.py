"""Every discovery keeps one contract; a file is followed, and a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.router.workers.discovery import DiscoveredWorker, Discovery, StaticDiscovery
from services.router.workers.file_discovery import FileDiscovery, parse_workers
from shared.errors import ConfigError
from shared.identity import BOTH, DECODE, PREFILL, roles_text
from tests.unit.router.workers.discovery_contract import (
    D0,
    D1,
    P0,
    Make,
    follow,
    test_nothing_is_read_before_the_start_and_close_twice_is_fine,  # noqa: F401  # run here
    test_the_view_is_there_soon_after_the_start_in_the_order_of_the_source,  # noqa: F401
)


def content(workers: Sequence[DiscoveredWorker]) -> bytes:
    """The file's content for these workers."""
    entries = [
        {"name": w.name, "role": roles_text(w.roles), "address": w.address, "label": "/".join(w.label)} for w in workers
    ]
    return yaml.safe_dump({"workers": entries}).encode()


def put(path: Path, text: bytes) -> None:
    """Replaces the file as one should."""
    beside = path.with_suffix(".new")
    beside.write_bytes(text)
    beside.replace(path)


@pytest.fixture(params=["static", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def made(workers: Sequence[DiscoveredWorker]) -> Discovery:
        if request.param == "static":
            return StaticDiscovery(workers)
        put(tmp_path / "workers.yaml", content(workers))
        return FileDiscovery(tmp_path / "workers.yaml", interval_s=0.01)

    return made


# --- the fixed list


def test_one_name_in_both_pools_is_refused():
    assert StaticDiscovery.of({"p": "h:1"}, {"d": "h:2"}, {"d": ("z",)}).workers == (
        DiscoveredWorker("p", PREFILL, "h:1"),
        DiscoveredWorker("d", DECODE, "h:2", ("z",)),
    )
    with pytest.raises(ConfigError, match="'a' is named twice"):
        StaticDiscovery.of({"a": "h:1"}, {"a": "h:2"})


# --- the file


async def test_a_file_is_followed_through_atomic_replaces_and_writes_in_place(tmp_path):
    path = tmp_path / "workers.yaml"
    put(path, content([D0]))
    async with follow(FileDiscovery(path, interval_s=0.01)) as followed:
        await followed.until(lambda: followed.views == [(D0,)])
        put(path, content([P0, D0]))
        await followed.until(lambda: followed.views[1:] == [(P0, D0)])
        path.write_bytes(b"# the same workers\n" + content([P0, D0]))
        path.write_bytes(content([D1]))
        await followed.until(lambda: followed.views[2:] == [(D1,)])
        put(path, b"workers: []")
        await followed.until(lambda: followed.views[3:] == [()])


async def test_a_file_behind_a_link_is_followed_when_the_link_moves(tmp_path):
    """As a Kubernetes ConfigMap is changed."""
    for number, worker in enumerate((D0, D1)):
        folder = tmp_path / f"v{number}"
        folder.mkdir()
        (folder / "workers.yaml").write_bytes(content([worker]))
    link = tmp_path / "data"
    link.symlink_to("v0")
    async with follow(FileDiscovery(link / "workers.yaml", interval_s=0.01)) as followed:
        await followed.until(lambda: followed.views == [(D0,)])
        (tmp_path / "next").symlink_to("v1")
        (tmp_path / "next").replace(link)
        await followed.until(lambda: followed.views == [(D0,), (D1,)])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"workers: [", "is not valid YAML"),
        (None, "cannot be read: No such file or directory"),
    ],
)
async def test_a_wrong_file_changes_nothing_and_is_logged_once(tmp_path, caplog, bad, reason):
    path = tmp_path / "workers.yaml"
    put(path, content([D0]))
    caplog.set_level(logging.INFO, "services.router.workers.file_discovery")
    async with follow(FileDiscovery(path, interval_s=0.005)) as followed:
        await followed.until(lambda: followed.views == [(D0,)])
        if bad is None:
            path.unlink()
        else:
            put(path, bad)
        await followed.until(lambda: bool(followed.discovery.failure))
        assert followed.discovery.failure.startswith(f"workers file {path}: {reason}")
        await asyncio.sleep(0.05)  # several readings
        assert (followed.discovery.workers, followed.views) == ((D0,), [(D0,)])
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert reason in errors[0]
        assert errors[0].endswith("the 1 workers of before stay")
        put(path, content([D0]))
        await followed.until(lambda: not followed.discovery.failure)
        assert followed.views == [(D0,)]
        put(path, content([D1]))
        await followed.until(lambda: followed.views == [(D0,), (D1,)])


async def test_a_file_that_comes_late_is_waited_for(tmp_path):
    path = tmp_path / "workers.yaml"
    discovery = FileDiscovery(path, interval_s=0.005)
    assert "has not been read yet" in discovery.failure
    async with follow(discovery) as followed:
        await followed.until(lambda: "No such file" in followed.discovery.failure)
        assert followed.discovery.workers == ()
        put(path, content([D0]))
        await followed.until(lambda: followed.views == [(D0,)])
        assert not followed.discovery.failure


NAMES = st.text("abc-01", min_size=1, max_size=4)
WORKERS = st.lists(
    st.builds(
        DiscoveredWorker,
        NAMES,
        st.sampled_from([PREFILL, DECODE, BOTH]),
        st.sampled_from(["h:1", "10.0.0.1:65535", "[::1]:3"]),
        st.lists(NAMES, max_size=3).map(tuple),
    ),
    max_size=5,
    unique_by=lambda worker: worker.name,
)


@given(WORKERS)
def test_workers_survive_the_file(workers):
    assert parse_workers(content(workers)) == tuple(workers)


@given(st.binary(max_size=40) | st.text("workers: [{}]&*a!\n-'", max_size=60).map(str.encode))
def test_any_content_is_workers_or_a_typed_error(data):
    try:
        assert parse_workers(data) == ()
    except ConfigError as caught:
        error = caught
    else:
        return
    assert error.field


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "workers: [{name: a, role: store, address: 'h:1'}]",
            "workers.0.role: Input should be 'prefill', 'decode' or 'prefill,decode'",
        ),
        ("", "content: Input should be a valid dictionary"),
        ("workers: [{name: d9, role: decode}]", "workers.0.address: Field required"),
        ("workers: [{name: '', role: decode, address: 'h:1'}]", "workers.0.name"),
        ("workers: [{name: a, role: decode, address: 'h:1', lable: z}]", "workers.0.lable: Extra inputs"),
        ("workers: [{name: a, role: decode, address: 'h:1', label: z//r}]", "workers.0.label: 'z//r'"),
        ("workers: [{name: a, role: decode, address: 'http://h:1'}]", "workers.0.address"),
        (
            "workers: [{name: a, role: decode, address: 'h:1'}, {name: a, role: prefill, address: 'h:2'}]",
            "'a' is named twice",
        ),
        ("worker: []", "workers: Field required"),
        ("workers: 3", "workers: Input should be a valid list"),
        ("workers: &w [*w]", "is not valid YAML: found unconstructable recursive node"),
        ("[" * 100_000, "is not valid YAML"),
    ],
)
def test_a_wrong_file_says_which_entry_is_wrong(text, reason):
    with pytest.raises(ConfigError) as caught:
        parse_workers(text.encode())
    assert reason in caught.value.message


def test_collocated_mode_refuses_prefill_workers():
    assert parse_workers(content([D0]), collocated=True) == (D0,)
    with pytest.raises(ConfigError, match="'p0'"):
        parse_workers(content([D0, P0]), collocated=True)


def test_a_name_that_looks_like_a_number_is_a_name():
    (worker,) = parse_workers(b"workers: [{name: 007, role: decode, address: h:1, label: no}]")
    assert (worker.name, worker.label) == ("007", ("no",))
