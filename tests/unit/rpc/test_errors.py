"""Errors on their way from one process to another."""

from __future__ import annotations

import pytest

from shared.errors import Internal, Overloaded, TandemError, TransferFailed, error_classes
from shared.kv.handoff.receiving import MemoryLost
from shared.rpc.errors import from_proto, to_proto


@pytest.mark.parametrize("cls", [cls for cls in error_classes().values() if cls.__module__ == "shared.errors"])
def test_every_shared_class_comes_back_as_itself(cls: type[TandemError]) -> None:
    back = from_proto(to_proto(cls("gone", limit=3)))
    assert type(back) is cls
    assert (back.message, back.retryable) == ("gone", cls.retryable)


def test_a_class_that_the_other_side_may_not_know_comes_back_as_what_it_specialises() -> None:
    """A router has never imported a decode worker's MemoryLost; as Internal it would not be tried again."""
    assert to_proto(MemoryLost("3 blocks may still be written")).kind == "TransferFailed"
    assert type(from_proto(to_proto(MemoryLost("gone")))) is TransferFailed


def test_what_is_no_error_of_ours_becomes_internal() -> None:
    assert to_proto(ValueError("x")).kind == "Internal"
    assert type(from_proto(to_proto(ValueError("x")))) is Internal


def test_the_pause_before_a_retry_comes_along() -> None:
    back = from_proto(to_proto(Overloaded("full", retry_after_s=2.5)))
    assert isinstance(back, Overloaded)
    assert back.retry_after_s == 2.5
