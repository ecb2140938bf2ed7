"""The records that explain placements are bounded by what their candidates take."""

from __future__ import annotations

import pytest

from services.router.dispatch.record import Ask, RequestRecord
from services.router.placement.decision import Candidate, Choice
from services.router.views.explanation import Explained, explanation
from shared.errors import NotFound

SEEN = (Candidate("d", 1.0, (), 0, 0, 0, 0),)


def placed(name: str) -> RequestRecord:
    return RequestRecord(Ask(name), choices=[Choice("d", "p", decodes=SEEN)])


def test_the_request_that_was_placed_longest_ago_is_forgotten_and_loses_its_candidates():
    log = Explained(2)
    a, b, again = placed("a"), placed("b"), placed("a")
    for record in (a, b, a, placed("c")):
        log.add(record)
    assert (log.find("a"), log.find("b"), len(log)) == (a, None, 2)
    assert (a.choices[0].decodes, b.choices[0].decodes) == (SEEN, ())
    assert (b.decode_worker, b.prefill_worker) == ("d", "p")
    log.add(again)
    assert log.find("a") is again


def test_a_log_without_room_keeps_nothing():
    log = Explained(0)
    log.add(placed("a"))
    assert log.find("a") is None
    with pytest.raises(NotFound):
        explanation(None, "a")
