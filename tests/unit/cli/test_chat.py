"""`tandem chat` carries the conversation from turn to turn."""

from __future__ import annotations

from shared.errors import Overloaded
from tests.unit.cli.conftest import RunTandem
from tests.unit.cli.scripted_router import ScriptedRouter


def messages(router: ScriptedRouter, turn: int) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in router.requests[turn].chat.messages]


def test_a_turn_carries_all_before_it(tandem: RunTandem, router: ScriptedRouter) -> None:
    result = tandem("chat", "--system", "Be brief.", stdin="Hi\n\nMore\n/exit\nnever sent\n")
    assert result.status == 0
    assert result.out == "Hello, world\nHello, world\n"
    assert messages(router, 0) == [("system", "Be brief."), ("user", "Hi")]
    assert messages(router, 1) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello, world"),
        ("user", "More"),
    ]
    assert len(router.requests) == 2


def test_reset_keeps_the_system_message_alone(tandem: RunTandem, router: ScriptedRouter) -> None:
    tandem("chat", "--system", "Be brief.", stdin="Hi\n/reset\nAgain\n")
    assert messages(router, 1) == [("system", "Be brief."), ("user", "Again")]


def test_a_turn_that_failed_is_reported_and_forgotten(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.responses, router.error, router.status_fails = [], Overloaded("the queue is full"), False
    result = tandem("chat", stdin="Hi\nAgain\n")
    assert result.status == 0
    assert result.err == "tandem: the queue is full\ntandem: the queue is full\n"
    assert messages(router, 1) == [("user", "Again")]


def test_an_unknown_command_is_not_sent(tandem: RunTandem, router: ScriptedRouter) -> None:
    result = tandem("chat", stdin="/quit\n")
    assert "no such command: /quit" in result.err
    assert router.requests == []


def test_nothing_at_the_target_is_said_before_the_first_question(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.close()
    result = tandem("chat", stdin="Hi\n")
    assert result.status == 1
    assert "start a cluster with `tandem serve`" in result.err
