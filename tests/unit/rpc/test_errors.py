"""Typed errors as messages: what the other side, another process with other imports, makes of them."""

from __future__ import annotations

from shared.errors import TransferFailed
from shared.kv.handoff.receiving import MemoryLost
from shared.rpc.errors import from_proto, to_proto


def test_an_error_of_another_room_crosses_as_its_base_in_the_tree() -> None:
    message = to_proto(MemoryLost("blocks may still be written", limit=5.0))
    assert message.kind == "TransferFailed"
    error = from_proto(message)
    assert type(error) is TransferFailed
    assert error.message == "blocks may still be written"
    assert error.details["limit"] == "5.0"


def test_what_is_no_error_of_the_tree_crosses_as_internal() -> None:
    assert to_proto(ValueError("odd")).kind == "Internal"
