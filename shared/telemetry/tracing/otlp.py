"""Spans in OTLP's protobuf: https://opentelemetry.io/docs/specs/otlp/, opentelemetry/proto/trace/v1/trace.proto.

Written as bytes, without the generated messages: a trace is twice as fast and leaves nothing in memory but what is sent
(docs/decisions/telemetry.md, 0185). Fields may come in any order, and of a message that comes twice the parts are
joined, so pieces of a request are put together by appending them. The tests read all of it with the generated messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct

from shared.telemetry.tracing.span import Attributes, Span, SpanKind, Value

SCOPE = "tandem"
_ERROR = b"\x18\x02"  # Status.code
_IDS = Struct(">2sQ2sQ")
_ID = Struct(">2sQ")
_TIMES = Struct("<BQBQ")
_TIME = Struct("<BQ")
_DOUBLE = Struct("<Bd")
_CACHED = 1024
"""Names and attributes, most of which come again with each trace."""


def encoded_spans(trace_id: int, spans: Sequence[Span], clock_offset_s: float) -> bytes:
    """Spans of one trace, for `encoded_request`. `clock_offset_s`: what to add to time.perf_counter() for Unix time."""
    trace = b"\x0a\x10" + trace_id.to_bytes(16, "big")
    parts: list[bytes] = []
    for span in spans:
        began, ended = span.began, span.ended
        start = round((began + clock_offset_s) * 1e9)
        end = round((ended + clock_offset_s) * 1e9) if ended > began else start
        ids = (
            _IDS.pack(b"\x12\x08", span.span_id, b"\x22\x08", span.parent_id)
            if span.parent_id
            else _ID.pack(b"\x12\x08", span.span_id)
        )
        body = trace + ids + _name(span.name, span.kind) + _TIMES.pack(0x39, start, 0x41, end)
        if span.attributes:
            body += b"".join([b"\x4a" + _attribute(key, value) for key, value in span.attributes.items()])
        if span.events or span.links or span.error or span.state:
            body += _rare(span, trace, clock_offset_s)
        parts += (b"\x12", _varint(len(body)), body)
    return b"".join(parts)


def encoded_request(resource: Attributes, spans: Iterable[bytes]) -> bytes:
    """An ExportTraceServiceRequest of this resource with what `encoded_spans` gave."""
    attributes = b"".join(b"\x0a" + _attribute(key, value) for key, value in resource.items())
    scope = _part(b"\x0a", _text(b"\x0a", SCOPE)) + b"".join(spans)
    return _part(b"\x0a", _part(b"\x0a", attributes) + _part(b"\x12", scope))


def _rare(span: Span, trace: bytes, clock_offset_s: float) -> bytes:
    body = b""
    for name, at, attributes in span.events:
        event = _TIME.pack(0x09, round((at + clock_offset_s) * 1e9)) + _text(b"\x12", name)
        for key, value in attributes.items():
            event += b"\x1a" + _attribute(key, value)
        body += _part(b"\x5a", event)
    for link in span.links:
        body += _part(b"\x6a", trace + _ID.pack(b"\x12\x08", link))
    if span.error:
        body += _part(b"\x7a", _text(b"\x12", span.error) + _ERROR)
    if span.state:
        body += _text(b"\x1a", span.state)
    return body


@lru_cache(_CACHED)
def _name(name: str, kind: SpanKind) -> bytes:
    return _text(b"\x2a", name) + bytes((0x30, kind))


@lru_cache(_CACHED, typed=True)
def _attribute(key: str, value: Value) -> bytes:
    """A KeyValue and its length, without its tag."""
    body = _text(b"\x0a", key) + _part(b"\x12", _any(value))
    return _varint(len(body)) + body


def _any(value: Value) -> bytes:
    """An AnyValue."""
    if isinstance(value, str):
        return _text(b"\x0a", value)
    if isinstance(value, bool):
        return bytes((0x10, value))
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return _DOUBLE.pack(0x21, value)
    return _part(b"\x2a", b"".join(_part(b"\x0a", _any(item)) for item in value))


def _text(tag: bytes, text: str) -> bytes:
    """Half of a pair of surrogates, which UTF-8 does not have, becomes a question mark."""
    return _part(tag, text.encode(errors="replace"))


def _part(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    if number < 0x80:
        return number.to_bytes(1, "little")
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
