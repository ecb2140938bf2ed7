"""Who of the store nodes answers, and what an operator gets of all of them."""

from __future__ import annotations

import pytest_asyncio

from shared.block_service.store_client import StoreClient
from shared.block_service.store_nodes import StoreNodes
from shared.errors import ModelMismatch, StoreUnavailable

GONE = StoreUnavailable("gone")


@pytest_asyncio.fixture
async def nodes():
    """Three nodes that nothing connects to: the tests say what a call to one of them gives."""
    made = StoreNodes({"a": "h:1", "b": "h:2", "c": "h:3"})
    yield made
    await made.close()


async def size(name: str, client: StoreClient) -> int:
    if name == "b":
        raise GONE
    return int(client.address[-1])


async def test_a_failed_node_is_not_live_and_changes_are_reported_once(nodes: StoreNodes):
    changes = []
    nodes.on_change = lambda: changes.append(nodes.silent)
    nodes.failed("b", GONE)
    nodes.failed("b", GONE)
    assert (nodes.live, nodes.silent, nodes.names) == (("a", "c"), ("b",), ("a", "b", "c"))
    nodes.refused("c", ModelMismatch("another layout"))
    nodes.refused("c", ModelMismatch("another layout"))
    nodes.failed("c", GONE)
    assert changes == [("b",), ("b", "c")]
    assert nodes.live == ("a",)


async def test_an_operator_asks_all_nodes_and_one_that_fails_is_an_answer(nodes: StoreNodes):
    nodes.failed("c", GONE)
    answers = await nodes.ask_all(size)
    assert [(answer.name, answer.address, answer.value, answer.error) for answer in answers] == [
        ("a", "h:1", 1, None), ("b", "h:2", None, GONE), ("c", "h:3", 3, None),
    ]  # fmt: skip
    assert nodes.silent == ("c",)
    assert [answer.name for answer in await nodes.ask_all(size, among={"c", "a"})] == ["a", "c"]


async def test_a_closed_registry_starts_no_probe(nodes: StoreNodes):
    await nodes.close()
    await nodes.close()
    nodes.failed("a", GONE)
    assert nodes.live == ("a", "b", "c")
