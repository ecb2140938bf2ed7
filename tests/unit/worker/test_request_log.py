"""What a worker's records say of a request."""

from __future__ import annotations

import logging

import pytest

from services.worker.attempt import attempt_log


@pytest.mark.parametrize(
    ("wire_id", "fields"),
    [("r-1#9.3", ("r-1", "3")), ("a#b#2.1.2", ("a#b", "1.2")), ("from elsewhere", ("from elsewhere", ""))],
)
def test_a_wire_id_is_the_request_s_own_and_the_attempt(wire_id: str, fields: tuple[str, str]) -> None:
    extra = attempt_log(logging.getLogger("part"), wire_id, {}).extra
    assert extra is not None
    assert (extra["request_id"], extra["attempt"]) == fields
