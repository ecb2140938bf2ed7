"""The ring of decisions is bounded and keeps attempts together."""

from __future__ import annotations

from services.router.placement.decision import Choice, Decision, DecisionLog


def decision(name: str, attempt: int = 1) -> Decision:
    return Decision(name, attempt, 64, 0.0, Choice("d", "p"))


def test_attempts_stay_together_and_the_oldest_request_is_forgotten():
    log = DecisionLog(2)
    log.note(decision("a"))
    log.note(decision("b"))
    log.note(decision("a", 2))
    log.note(decision("c"))
    assert [d.attempt for d in log.of("a")] == [1, 2]
    assert log.of("b") == []
    log.note(decision("a"))  # the id is used again
    assert [d.attempt for d in log.of("a")] == [1]
    assert len(log) == 2


def test_a_log_without_room_keeps_nothing():
    log = DecisionLog(0)
    log.note(decision("a"))
    assert log.of("a") == []
