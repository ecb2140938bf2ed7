"""Errors on the wire: whatever one quotes, it arrives, also at a process with other imports."""

from __future__ import annotations

import base64

import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest, Overloaded, TandemError, TransferFailed, brief_bytes
from shared.kv.handoff.receive_handoff import MemoryLost
from shared.rpc.errors import ERROR_TRAILER, STATUS_TRAILER, abort, answer, from_proto, in_trailers, to_proto
from shared.rpc.pb.tandem.v1 import types_pb2

DEFAULT_LIMIT_BYTES = 8 * 1024
"""Of gRPC's clients for all of a call's metadata."""
CHARS = st.sampled_from(["a", "\n", "é", "🎉", "\ud800"])


class Context:
    """Keeps what a call ended with."""

    async def abort(self, code, details, trailers) -> None:
        self.code, self.details, self.trailers = code, details, trailers
        raise SystemError("aborted")

    @property
    def num_bytes(self) -> int:
        """On the wire: the status's text is percent-encoded, a binary trailer is in base64."""
        text = sum(1 if 0x20 <= byte <= 0x7E and byte != ord("%") else 3 for byte in self.details.encode())
        trailers = (value if isinstance(value, bytes) else value.encode() for _, value in self.trailers)
        return text + sum(len(base64.b64encode(value)) + 64 for value in trailers)

    @property
    def status(self) -> status_pb2.Status:
        return status_pb2.Status.FromString(dict(self.trailers)[STATUS_TRAILER])

    def detail(self, kind):
        """The one detail of that kind; None where there is none."""
        found = [detail for detail in self.status.details if detail.Is(kind.DESCRIPTOR)]
        if not found:
            return None
        (packed,), unpacked = found, kind()
        packed.Unpack(unpacked)
        return unpacked

    @property
    def error(self) -> TandemError:
        return from_proto(types_pb2.Error.FromString(dict(self.trailers)[ERROR_TRAILER]))


async def aborted(error: BaseException) -> Context:
    context = Context()
    with pytest.raises(SystemError, match="aborted"):
        await abort(context, error)  # type: ignore[arg-type]
    return context


@given(CHARS, st.lists(CHARS, max_size=30), st.sampled_from([0, 1, 99, 400, 20_000]))
async def test_whatever_an_error_quotes_fits_the_trailers(char, details, length):
    quoted = {f"detail_{number}": other * length for number, other in enumerate(details)}
    context = await aborted(InvalidRequest(char * length, **quoted, field="prompt"))
    assert context.num_bytes < DEFAULT_LIMIT_BYTES // 2
    assert isinstance(context.error, InvalidRequest)
    assert context.error.field == "prompt"


async def test_clients_of_the_rich_error_model_find_reason_field_and_when_to_come_back():
    wrong = await aborted(InvalidRequest("top_p must be in (0, 1], got 0", field="top_p", limit="(0, 1]"))
    assert (wrong.status.code, wrong.status.message) == (3, wrong.details)
    info = wrong.detail(error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INVALID_VALUE", "tandem", {"limit": "(0, 1]"})
    (violation,) = wrong.detail(error_details_pb2.BadRequest).field_violations
    assert violation.field == "top_p"
    assert wrong.detail(error_details_pb2.RetryInfo) is None
    full = await aborted(Overloaded("full", retry_after_s=2.5))
    assert full.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 2500
    assert full.detail(error_details_pb2.BadRequest) is None


async def test_a_bugs_text_fits_too():
    async def work():
        raise ValueError("🎉" * 100_000)

    context = Context()
    with pytest.raises(SystemError, match="aborted"):
        await answer(work(), context)  # type: ignore[arg-type]
    assert context.num_bytes < DEFAULT_LIMIT_BYTES // 2


def test_what_fits_is_left_as_it_is():
    error = in_trailers(Overloaded("später", retry_after_s=2.5, limit=3))
    assert (error.message, dict(error.details)) == ("später", {"retry_after_s": "2.5", "limit": "3"})


@given(st.text(), st.integers(8, 60))
def test_a_text_is_shortened_between_its_characters(text, max_bytes):
    short = brief_bytes(text, max_bytes)
    assert len(short.encode()) <= max_bytes
    if len(text.encode(errors="replace")) > max_bytes:
        head, _, end = short.rpartition(" … ")
        assert text.startswith(head)
        assert text.endswith(end)
    else:
        assert short == text.encode(errors="replace").decode()


def test_an_error_of_another_room_crosses_as_its_base_in_the_tree() -> None:
    message = to_proto(MemoryLost("blocks may still be written", limit=5.0))
    assert message.kind == "TransferFailed"
    error = from_proto(message)
    assert type(error) is TransferFailed
    assert error.message == "blocks may still be written"
    assert error.details["limit"] == "5.0"


def test_what_is_no_error_of_the_tree_crosses_as_internal() -> None:
    assert to_proto(ValueError("odd")).kind == "Internal"
