"""What waits for a stream's writer leaves in order, joined, and not beyond its limits."""

from __future__ import annotations

import asyncio

from shared.rpc import outbox
from shared.rpc.outbox import Outbox
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2


def cancel(request_id: str) -> bytes:
    command = worker_pb2.Command(cancel=types_pb2.Cancel(request_id=request_id))
    return worker_pb2.Commands(commands=[command]).SerializeToString()


def names(envelope: bytes | None) -> list[str]:
    assert envelope is not None
    return [command.cancel.request_id for command in worker_pb2.Commands.FromString(envelope).commands]


async def test_all_commands_of_one_turn_of_the_loop_are_one_envelope():
    waiting = Outbox(100)
    taking = asyncio.create_task(waiting.take())
    await asyncio.sleep(0)  # the writer waits already
    for name in ("a", "b", "c"):
        assert waiting.put(cancel(name))
    assert names(await taking) == ["a", "b", "c"]
    assert len(waiting) == 0


async def test_an_envelope_takes_no_more_once_it_is_large(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_ENVELOPE_BYTES", 2 * len(cancel("a")))
    waiting = Outbox(100)
    for name in ("a", "b", "c"):
        waiting.put(cancel(name))
    assert names(await waiting.take()) == ["a", "b"]
    assert names(await waiting.take()) == ["c"]


async def test_what_is_too_much_is_refused_and_the_end_comes_behind_what_waits():
    waiting = Outbox(2)
    assert waiting.put(cancel("a"))
    assert waiting.put(cancel("b"))
    assert not waiting.put(cancel("c"))
    waiting.close()
    assert names(await waiting.take()) == ["a", "b"]
    assert await waiting.take() is None


async def test_what_waits_when_it_is_dropped_is_not_kept():
    waiting = Outbox(2)
    assert waiting.put(cancel("a"))
    waiting.drop()
    assert len(waiting) == 0
    assert await waiting.take() is None
