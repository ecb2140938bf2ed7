"""A model folder from a worker that serves it: whole or not at all, whatever one of the peers does."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.settings import WorkerSettings
from services.worker.weights import files
from services.worker.weights.__main__ import main as fetch_alone
from services.worker.weights.fetch import STAGING, FolderFetch, addresses_of, fetch_missing_folder
from services.worker.weights.server import SERVICE_NAME, WeightServicer, own_transfer
from shared.config import load_settings
from shared.errors import ModelLoadError
from shared.kv.fleet_key import FleetKey, token_of
from shared.kv.transfer import TRAILER_INDEX
from shared.model.checkpoints import write_random_checkpoint
from shared.process import EXIT_REFUSED
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import weights_pb2
from shared.rpc.server import RpcServer
from tests.tls_files import Authority

SECRET = b"a secret of the fleet"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Three files of weights with a few parts together, a tokenizer that is none, and what must not travel."""
    folder = tmp_path_factory.mktemp("source")
    write_random_checkpoint(
        folder,
        hidden_size=256,
        intermediate_size=2048,
        num_layers=4,
        vocab_size=30_000,
        dtype=torch.float32,
        max_shard_bytes=34_000_000,
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not of the model")
    return folder


@contextlib.asynccontextmanager
async def peer(folder: Path, key: FleetKey | None = None, transfer=own_transfer):
    """Serves a folder; yields the server and its host:port."""
    servicer = WeightServicer(lambda: folder, FleetGuard(token_of(key)), key, transfer)
    server = RpcServer("127.0.0.1:0", servicer.register, (SERVICE_NAME,))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wanted(source: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(source).items() if name != "notes.txt"}


def flawed(at: int, flaw):
    """A transfer plane whose send number `at` is `flaw(send_blocks, address, ticket, blocks, on_taken)`."""

    def make(key):
        transfer = own_transfer(key)
        send_blocks, count = transfer.send_blocks, 0

        async def send(address, ticket, blocks, on_taken):
            nonlocal count
            count += 1
            if count == at:
                await flaw(send_blocks, address, ticket, blocks, on_taken)
            else:
                await send_blocks(address, ticket, blocks, on_taken)

        transfer.send_blocks = send
        return transfer

    return make


async def damage(send_blocks, address, ticket, blocks, on_taken):
    for index, memory in blocks:
        if index != TRAILER_INDEX:
            memory[len(memory) // 2] ^= 1
    await send_blocks(address, ticket, blocks, on_taken)


@pytest.mark.parametrize("encryption", [None, "none", "aes-gcm"])
async def test_a_folder_comes_whole_and_equal(source, tmp_path, encryption):
    def key():
        return None if encryption is None else FleetKey(SECRET, encryption=encryption)

    seen = []
    async with peer(source, key()) as server:
        folder = tmp_path / "models" / "copy"
        fetched = await FolderFetch(folder, key(), on_progress=lambda *told: seen.append(told)).from_any(
            [server.address]
        )
    assert contents(folder) == wanted(source)
    assert fetched is not None
    assert fetched.num_bytes == sum(map(len, wanted(source).values()))
    assert seen[-1] == (1.0, "fetching weights")


async def test_a_stranger_gets_nothing(source, tmp_path):
    async with peer(source, FleetKey(SECRET)) as server:
        with pytest.raises(ModelLoadError, match="only services with the fleet's key may call this"):
            await FolderFetch(tmp_path).from_any([server.address])
    assert not contents(tmp_path)


async def test_a_damaged_tensor_is_named_and_the_next_peer_brings_it(source, tmp_path, caplog):
    async with peer(source, transfer=flawed(2, damage)) as bad, peer(source) as good:
        fetched = await FolderFetch(tmp_path).from_any([bad.address, good.address])
    assert fetched.peer == good.address
    assert contents(tmp_path) == wanted(source)
    assert f"worker {bad.address} did not bring" in caplog.text
    assert "arrived damaged" in caplog.text
    assert any(name in caplog.text for name in ("model.layers.", "model.embed_tokens.weight", "lm_head.weight"))


async def test_what_a_peer_brought_before_it_died_is_not_fetched_again(source, tmp_path):
    asked = []

    def counted(key):
        transfer = own_transfer(key)
        send_blocks = transfer.send_blocks

        async def send(address, ticket, blocks, on_taken):
            asked.append(ticket)
            await send_blocks(address, ticket, blocks, on_taken)

        transfer.send_blocks = send
        return transfer

    async def die(*_):
        await dying.stop(grace_s=0)

    num_parts = sum(len(list(files.parts_of(name, len(data)))) for name, data in wanted(source).items())
    async with peer(source, transfer=flawed(num_parts - 2, die)) as dying, peer(source, transfer=counted) as good:
        fetched = await FolderFetch(tmp_path).from_any([dying.address, good.address])
    assert fetched.peer == good.address
    assert contents(tmp_path) == wanted(source)
    assert 0 < len(asked) < num_parts


async def test_where_no_peer_has_it_the_error_says_why_of_each_and_the_folder_is_as_it_was(source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    next(iter(sorted(broken.glob("*.safetensors")))).unlink()
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("mine")
    async with peer(broken) as lacking, peer(source, transfer=flawed(1, damage)) as bad:
        with pytest.raises(ModelLoadError) as raised:
            await FolderFetch(folder).from_any([lacking.address, bad.address])
    assert raised.value.field == "weights_from"
    assert f"{lacking.address}: " in raised.value.message
    assert f"{bad.address}: " in raised.value.message
    assert contents(folder) == {"tokenizer.json": b"mine"}


async def test_a_folder_that_is_whole_stays(source, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    assert await FolderFetch(folder).from_any(["127.0.0.1:1"]) is None
    assert not (folder / STAGING).exists()


async def test_a_folder_that_cannot_be_looked_at_is_refused_by_name(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be written to") as raised:
        await FolderFetch(tmp_path / ("x" * 300)).from_any(["127.0.0.1:1"])
    assert raised.value.field == "model"
    assert not files.is_whole(tmp_path / ("x" * 300))


async def test_names_outside_the_folder_are_refused(source, tmp_path, monkeypatch):
    describe = WeightServicer._describe

    async def lie(self, context):
        described = await describe(self, context)
        described.files.append(weights_pb2.WeightFile(name="../outside.json", num_bytes=1))
        return described

    monkeypatch.setattr(WeightServicer, "_describe", lie)
    async with peer(source) as server:
        with pytest.raises(ModelLoadError, match="not a plain file name"):
            await FolderFetch(tmp_path / "in").from_any([server.address])
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


async def test_a_name_without_an_address_is_no_peer():
    assert await addresses_of("no-such-host.invalid:1") == []
    assert await addresses_of("127.0.0.1:7") == ["127.0.0.1:7"]


@pytest.mark.parametrize(
    ("host", "names"), [("localhost", "DNS:localhost"), ("127.0.0.1", "IP:127.0.0.1"), ("localhost", "DNS:other")]
)
async def test_a_peers_certificate_has_the_name_that_weights_from_has(source, tmp_path, host, names):
    authority = Authority(tmp_path)
    cert, key = authority.issue("peer", names)
    folder = tmp_path / "copy"
    tls = [f"--tls.cert={cert}", f"--tls.key={key}", f"--tls.ca={authority.cert}"]
    settings = load_settings(WorkerSettings, ["--name=w", f"--model={folder}", *tls])
    servicer = WeightServicer(lambda: source, FleetGuard(""), None, own_transfer)
    server = RpcServer(f"{host}:0", servicer.register, (SERVICE_NAME,), credentials=settings.tls.server_credentials())
    await server.start()
    try:
        port = server.address.rpartition(":")[2]
        fetching = fetch_missing_folder(settings.model_copy(update={"weights_from": f"{host}:{port}"}), lambda *_: None)
        if names == "DNS:other":
            with pytest.raises(ModelLoadError, match="no worker gave one"):
                await fetching
        else:
            assert (await fetching) is not None
            assert contents(folder) == wanted(source)
    finally:
        await server.stop(grace_s=0)
    assert await fetch_missing_folder(settings, lambda *_: None) is None


async def test_a_disk_that_writes_a_part_at_a_time_gets_all(tmp_path, monkeypatch):
    class Slow(FileIO):
        def write(self, data):
            return super().write(data[:1_000_003])

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode, **_: Slow(path, mode.replace("b", "")))
        fetch = FolderFetch(tmp_path)
        fetch._staging.mkdir()
        data = np.arange(3 * files.PIECE_BYTES // 8, dtype=np.uint64).view(np.uint8)
        views = [memoryview(data[at : at + files.PIECE_BYTES]) for at in range(0, len(data), files.PIECE_BYTES)]
        part = files.FilePart("f", 0, 3, len(data) - 5)
        fetch._make_files([weights_pb2.WeightFile(name="f", num_bytes=part.num_bytes)])
        sent = weights_pb2.SentWeights(checksums=files.checksums_of(views), contents=["", "", ""])
        fetch._store(part, views, sent)
    assert (fetch._staging / "f").read_bytes() == data[:-5].tobytes()


def test_a_fetch_from_nobody_of_a_folder_that_is_not_there_fails(source, tmp_path, capfd):
    for folder, status in ((tmp_path / "none", EXIT_REFUSED), (source, 0)):
        assert fetch_alone(["--name=w", f"--model={folder}"]) == status
        assert ("weights_from names nobody" in "".join(capfd.readouterr())) == bool(status)


async def test_a_command_fetches_what_no_peer_brings(source, tmp_path):
    async def fetch(folder: str, address: str) -> int | None:
        given = [
            "--name=w",
            f"--model={tmp_path / folder}",
            f"--weights-from={address}",
            "--",
            "touch",
            f"{tmp_path}/called-{folder}",
        ]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.worker.weights", *given)
        return await process.wait()

    async with peer(source) as server:
        address = server.address
        assert await fetch("a", address) == 0
    assert contents(tmp_path / "a") == wanted(source)
    assert await fetch("b", address) == 0, "the command's"
    assert [path.name for path in sorted(tmp_path.glob("called-*"))] == ["called-b"]


def test_a_command_that_is_none_is_named(tmp_path, capfd):
    assert fetch_alone(["--name=w", f"--model={tmp_path / 'none'}", "--", "no-such-program"]) == EXIT_REFUSED
    assert "no-such-program cannot run" in "".join(capfd.readouterr())
