"""Event lines become typed values; anything else on stdout is no event."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, Internal
from shared.process_events import Answer, Progress, Ready, parse_event


def test_each_event_is_read() -> None:
    assert parse_event(b'{"event":"progress","fraction":0.4,"text":"loading"}\n') == Progress(0.4, "loading")
    assert parse_event(b'{"event":"ready","address":"h:1"}') == Ready("h:1")
    ready = parse_event(b'{"event":"ready","address":"h:1","http":"h:2","grpc":"h:3"}')
    assert ready == Ready("h:1", {"http": "h:2", "grpc": "h:3"})
    assert parse_event(b'{"event":"answer","value":[1.5]}') == Answer([1.5])


def test_an_error_comes_back_as_its_class_with_its_field() -> None:
    error = parse_event(b'{"event":"error","kind":"ConfigError","message":"no","field":"bind"}')
    assert isinstance(error, ConfigError)
    assert (error.message, error.field) == ("no", "bind")


def test_an_error_of_an_unknown_kind_is_internal() -> None:
    error = parse_event(b'{"event":"error","kind":"Surprise","message":"?","field":null}')
    assert isinstance(error, Internal)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        b"\xff\xfe",
        b"[1]",
        b"3",
        b'{"event":"ready"}',
        b'{"event":"answer"}',
        b'{"event":"progress","text":"x"}',
    ],
)
def test_what_is_no_event_is_none(line: bytes) -> None:
    assert parse_event(line) is None


@given(fraction=st.floats(allow_nan=False, allow_infinity=False))
def test_a_fraction_stays_within_its_bounds(fraction: float) -> None:
    event = parse_event(json.dumps({"event": "progress", "fraction": fraction, "text": ""}).encode())
    assert isinstance(event, Progress)
    assert 0.0 <= event.fraction <= 1.0
