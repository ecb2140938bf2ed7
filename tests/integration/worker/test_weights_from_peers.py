"""A model folder from a worker that serves it: whole or not at all, whatever one of the peers does."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch

from services.worker.weights import files
from services.worker.weights.fetch import STAGING, FolderFetch, addresses_of
from services.worker.weights.server import SERVICE_NAME, WeightServicer, own_transfer
from shared.errors import ModelLoadError
from shared.kv.fleet_key import FleetKey, token_of
from shared.kv.transfer import TRAILER_INDEX
from shared.model.checkpoints import write_random_checkpoint
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import weights_pb2
from shared.rpc.server import RpcServer

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
