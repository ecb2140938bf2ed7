"""What a match stream writes, over a stream whose writes and answers the test gives."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from shared.errors import Internal, StoreUnavailable
from shared.kv_index.client import MatchStream
from shared.rpc.pb.tandem.v1 import kvstore_pb2

DEADLINE_S = 60.0


class Stream:
    """gRPC's side: keeps what is written once `gate` is open, and answers with what is put into `answers`."""

    def __init__(self) -> None:
        self.written: list[kvstore_pb2.MatchCall] = []
        self.answers: asyncio.Queue[kvstore_pb2.MatchAnswer | None] = asyncio.Queue()
        self.gate = asyncio.Event()
        self.gate.set()
        self.has_ended = False

    async def write(self, call: kvstore_pb2.MatchCall) -> None:
        await self.gate.wait()
        if self.has_ended:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.written.append(call)

    async def read(self) -> kvstore_pb2.MatchAnswer | None:
        return await self.answers.get()

    def cancel(self) -> None:
        self.answers.put_nowait(None)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
async def matches(stream: Stream) -> AsyncIterator[MatchStream]:
    made = MatchStream(stream, "h:1", lambda error: Internal(str(error)))  # type: ignore[arg-type]
    yield made
    await made.close()
    await made.close()


async def until_written(stream: Stream, num_calls: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(stream.written) < num_calls:
            await asyncio.sleep(0)


async def test_traces_that_are_kept_together_go_in_one_call(stream: Stream, matches: MatchStream) -> None:
    for name in (b"a", b"b"):
        matches.keep_trace(name)
    await until_written(stream, 1)
    stream.gate.clear()
    matches.keep_trace(b"c")
    await asyncio.sleep(0)  # its write begins
    for name in (b"d", b"e"):
        matches.keep_trace(name)
    stream.gate.set()
    await until_written(stream, 3)
    assert [list(call.kept_traces) for call in stream.written] == [[b"a", b"b"], [b"c"], [b"d", b"e"]]


async def test_answers_find_their_questions_in_any_order(stream: Stream, matches: MatchStream) -> None:
    asked = [asyncio.create_task(matches.ask(kvstore_pb2.MatchRequest(), DEADLINE_S)) for _ in range(2)]
    await until_written(stream, 2)
    for call in reversed(stream.written):
        response = kvstore_pb2.MatchResponse(holders=[kvstore_pb2.Holder() for _ in range(call.id)])
        stream.answers.put_nowait(kvstore_pb2.MatchAnswer(id=call.id, response=response))
    assert [len((await each).holders) for each in asked] == [1, 2]


async def test_an_end_of_the_stream_fails_who_waits_and_who_comes_later(stream: Stream, matches: MatchStream) -> None:
    asked = asyncio.create_task(matches.ask(kvstore_pb2.MatchRequest(), DEADLINE_S))
    await until_written(stream, 1)
    assert matches.is_open
    stream.answers.put_nowait(None)
    for waiting in (asked, matches.ask(kvstore_pb2.MatchRequest(), DEADLINE_S)):
        with pytest.raises(StoreUnavailable, match="h:1 ended the stream"):
            await waiting
    assert not matches.is_open


async def test_an_end_before_the_question_is_written_is_raised_once_and_logged_by_nobody(
    stream: Stream, matches: MatchStream, caplog: pytest.LogCaptureFixture
) -> None:
    stream.gate.clear()
    asked = asyncio.create_task(matches.ask(kvstore_pb2.MatchRequest(), DEADLINE_S))
    await asyncio.sleep(0)  # its write begins
    stream.answers.put_nowait(None)
    async with asyncio.timeout(DEADLINE_S):
        while matches.is_open:
            await asyncio.sleep(0)
    stream.has_ended = True
    stream.gate.set()
    await asyncio.wait({asked})
    assert isinstance(asked.exception(), StoreUnavailable)
    del asked  # and with its frames the future that it did not come to await
    gc.collect()
    assert not caplog.records
