"""Prefixes from peers' pools: split between them, and whole again whatever one of them does."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.blocks import connector
from shared.block_service.client import BlockClient
from shared.errors import ModelMismatch, StoreUnavailable, TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.transfer import TRAILER_INDEX
from tests.integration.worker.rig import BLOCK_BYTES, BLOCK_SIZE, prompt, workers
from tests.waiting import until

SILENT_S = 10.0
"""Longer than anybody waits for a send."""


def send_by(monkeypatch, transfer, send):
    """Each block that the transfer sends passes through `send(pass_on, index, memory)`, which may pass it on."""
    send_blocks = transfer.send_blocks

    async def one_by_one(address, ticket, blocks, on_taken):
        async def pass_on(index, memory):
            await send_blocks(address, ticket, [(index, memory)], on_taken)

        for index, memory in blocks:
            if index == TRAILER_INDEX:
                await pass_on(index, memory)
            else:
                await send(pass_on, index, memory)

    monkeypatch.setattr(transfer, "send_blocks", one_by_one)


async def stay_silent(*_):
    await asyncio.sleep(SILENT_S)


async def test_a_prefix_comes_from_all_peers_that_hold_it_at_once():
    tokens, names = prompt(48)
    async with workers(3) as (a, b, c):
        await a.has(names)
        await b.has(names[:40])
        fetch = await c.fetch(tokens, [(a, 48), (b, 40)])
        assert c.found(names) == list(range(48))
        assert fetch.num_tokens == fetch.num_peer_tokens == 48 * BLOCK_SIZE
        assert a.connector.server.num_given + b.connector.server.num_given == 48
        assert b.connector.server.num_given == 16  # one whole piece of three: that with the end of the chain is a's
        for worker in (a, b, c):
            await worker.idle()


async def test_what_is_here_already_is_not_fetched_again():
    tokens, names = prompt(20)
    async with workers(2) as (a, b):
        await a.has(names)
        await b.has(names[:7])
        await b.has(names[9:11])
        fetch = await b.fetch(tokens, [(a, 20)])
        assert b.found(names) == list(range(20))
        assert fetch.num_tokens == (20 - 9) * BLOCK_SIZE
        assert (await b.fetch(tokens, [(a, 20)])).task is None


async def test_a_block_damaged_in_a_peers_memory_is_dropped_and_counted():
    tokens, names = prompt(20)
    async with workers(2) as (a, b):
        await a.has(names)
        a.damage(names[3])
        a.damage(names[17])
        fetch = await b.fetch(tokens, [(a, 20)])
        assert b.found(names) == [i for i in range(20) if i not in (3, 17)]
        assert b.engine.exchange.num_bad_blocks == 2
        assert fetch.num_peer_tokens == 18 * BLOCK_SIZE
        await b.idle()


async def test_what_a_peer_has_lost_since_the_index_heard_of_it_is_had_from_another():
    tokens, names = prompt(20)
    async with workers(3) as (a, b, c):
        await a.has(names)
        await b.has(names)
        await a.loses(names[4:12])
        await c.fetch(tokens, [(a, 20), (b, 20)])
        assert c.found(names) == list(range(20))


async def test_a_peer_that_fails_in_the_middle_costs_its_own_blocks_alone(monkeypatch):
    tokens, names = prompt(32)
    async with workers(3) as (a, b, c):
        await a.has(names[:16])
        await b.has(names)
        sent = 0

        async def break_off(pass_on, index, memory):
            nonlocal sent
            sent += 1
            if sent > 5:
                raise TransferFailed("the cable was cut")
            await pass_on(index, memory)

        send_by(monkeypatch, a.transfer, break_off)
        # The last run is b's alone; of the first one a has the turn.
        await c.fetch(tokens, [(a, 16), (b, 32)])
        found = c.found(names)
        assert set(range(16, 32)) <= set(found)
        assert len(found) < 32
        assert c.connector.fetches.num_failed == 1
        for worker in (a, b, c):
            await worker.idle()


async def test_a_peer_that_is_gone_is_left_alone_and_costs_nothing():
    tokens, names = prompt(10)
    async with workers(2) as (a, b):
        await a.has(names)
        await a.rpc.stop(0)
        fetch = await b.fetch(tokens, [(a, 10)])
        assert fetch.task is None
        assert b.connector._peers.client(a.address) is None
        assert b.engine.pool.num_used == 0


@pytest.mark.parametrize(("mode", "limit"), [("auto", "TIMEOUT_S"), ("always", "SILENCE_S")])
async def test_a_peer_that_falls_silent_is_given_up(monkeypatch, mode, limit):
    tokens, names = prompt(10)
    async with workers(2, mode=mode) as (a, b):
        monkeypatch.setattr(f"services.worker.blocks.prefix_fetch.fetch_policy.{limit}", 0.2)
        await a.has(names)
        send_by(monkeypatch, a.transfer, stay_silent)
        await b.fetch(tokens, [(a, 10)])
        assert b.found(names) == []
        assert b.connector.fetches.num_failed == 1
        await b.idle()


@pytest.mark.slow
async def test_blocks_that_a_silent_peer_may_write_to_are_free_once_it_cannot(monkeypatch):
    tokens, names = prompt(32)
    async with workers(3, mode="auto") as (a, b, c):
        monkeypatch.setattr("services.worker.blocks.prefix_fetch.fetch_policy.TIMEOUT_S", 3.0)
        await a.has(names[:16])
        await b.has(names)
        send_by(monkeypatch, a.transfer, stay_silent)
        safe, expect, cancel = asyncio.Event(), c.transfer.expect, c.transfer.cancel
        closed = 0

        async def closing():
            nonlocal closed
            closed += 1
            await safe.wait()

        def expecting(*arguments):
            incoming = expect(*arguments)
            incoming.closed = closing
            return incoming

        async def cancelling(ticket):
            is_silent = not c.transfer._incoming[ticket].receives[0].ended.is_set()
            await cancel(ticket)
            if is_silent:
                raise TransferFailed("a sender is silent", memory_lost=True)

        monkeypatch.setattr(c.transfer, "expect", expecting)
        monkeypatch.setattr(c.transfer, "cancel", cancelling)
        await c.fetch(tokens, [(a, 16), (b, 32)])
        assert c.found(names) == list(range(16, 32))
        await asyncio.sleep(0)
        assert (closed, c.engine.pool.num_used) == (1, 16)
        safe.set()
        await c.idle()


async def test_a_fetch_that_is_given_up_leaves_no_block_held_on_either_side(monkeypatch):
    tokens, names = prompt(40)
    async with workers(2, mode="auto") as (a, b):
        await a.has(names)
        holding = asyncio.Event()

        async def wait_and_send(pass_on, index, memory):
            holding.set()
            await asyncio.sleep(0.05)
            await pass_on(index, memory)

        send_by(monkeypatch, a.transfer, wait_and_send)
        asking = asyncio.create_task(b.fetch(tokens, [(a, 40)]))
        await holding.wait()
        asking.cancel()
        for task in list(b.connector.fetches._tasks):
            task.cancel()
        await asyncio.wait({asking})
        await b.idle()
        await a.idle()


async def test_blocks_held_for_others_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(connector, "MAX_HELD", 6)
    tokens, names = prompt(30)
    async with workers(3) as (a, b, c):
        await a.has(names)
        most = 0

        async def count(pass_on, index, memory):
            nonlocal most
            most = max(most, a.engine.pool.num_used)
            await pass_on(index, memory)

        send_by(monkeypatch, a.transfer, count)
        await asyncio.gather(*(worker.fetch(tokens, [(a, 30)]) for worker in (b, c)))
        assert b.found(names) == c.found(names) == list(range(30))
        assert 0 < most <= 6
        await a.idle()


async def test_blocks_of_another_size_are_refused_by_name():
    _, names = prompt(3)
    async with workers(1) as (a,):
        await a.has(names)
        client = BlockClient(a.address)
        with pytest.raises(ModelMismatch, match=f"have {BLOCK_BYTES} bytes, those asked for 64") as caught:
            async for _ in client.fetch(names, 64, 1, b"", 5.0):
                pass
        assert caught.value.details["field"] == "block_bytes"
        await client.close()
        with pytest.raises(StoreUnavailable):
            await client.look_up(names)
        await a.idle()


async def test_a_store_node_that_is_gone_is_passed_over_until_it_answers(monkeypatch):
    """Another worker serves as the node: the service is the same."""
    monkeypatch.setattr("shared.block_service.store_nodes.RETRY_S", 0.02)
    tokens, names = prompt(12)
    async with workers(1) as (store,):
        await store.has(names)
        address = store.address
        async with workers(1, {"s": address}) as (w,):
            changes = []
            w.connector.nodes.on_change = lambda: changes.append(w.connector.nodes.silent)
            await store.rpc.stop(0)
            assert (await w.fetch(tokens, num_stored=12)).task is None
            assert changes == [("s",)]
            assert not w.connector.nodes.live
            store.rpc._bind = address
            await store.rpc.start()
            await until(lambda: len(changes) >= 2)
            assert w.connector.nodes.live == ("s",)


@pytest.mark.parametrize("encryption", ["none", "aes-gcm"])
async def test_in_a_fleet_with_a_key_a_forged_block_of_a_peer_is_dropped_though_its_checksum_is_right(
    encryption, monkeypatch
):
    key = FleetKey(b"the fleet's secret of some bytes", encryption=encryption)
    tokens, names = prompt(20)
    async with workers(2, key=key) as (a, b):
        await a.has(names)
        crossed = []

        async def forge(pass_on, index, memory):
            changed = bytearray(memory)
            if index == 3:
                changed[7], changed[8] = changed[8], changed[7]  # the checksum of these tests is their sum
            crossed.append(bytes(changed))
            await pass_on(index, memoryview(changed))

        send_by(monkeypatch, a.transfer, forge)
        fetch = await b.fetch(tokens, [(a, 20)])
        assert b.found(names) == [i for i in range(20) if i != 3]
        assert b.engine.exchange.num_bad_blocks == 1
        assert fetch.num_peer_tokens == 19 * BLOCK_SIZE
        assert any(names[5] in wire for wire in crossed) == (encryption == "none")
        for worker in (a, b):
            await worker.idle()
