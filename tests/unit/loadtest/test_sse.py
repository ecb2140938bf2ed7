"""Server-sent events, however the network cuts them."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.clients.sse import EventParser

STREAM = (
    b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\n\ndata: three\ndata: lines\n\n\n\ndata: [DONE]\n\ndata: cut'
)
EVENTS = [b'{"a": 1}', b"two", b"three\nlines", b"[DONE]"]


def test_events_come_out_whole_and_an_unfinished_one_does_not() -> None:
    assert EventParser().feed(STREAM) == EVENTS


@settings(max_examples=40)
@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_it_does_not_matter_where_the_stream_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    found = []
    for start, end in itertools.pairwise(edges):
        found += parser.feed(STREAM[start:end])
    assert found == EVENTS


def test_a_whole_event_at_a_time_is_the_same_as_any_other_cut() -> None:
    parser = EventParser()
    assert parser.feed(b"data: one\n\n") == [b"one"]
    assert parser.feed(b"data: two\r\n") == []
    assert parser.feed(b"data: more\n\n") == [b"two\nmore"]
    assert parser.feed(b"data: a\nb") == []
    assert parser.feed(b"data: c\n\n") == [b"a"], "what begins in the middle of a line is a part of that line"
