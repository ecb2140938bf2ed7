"""Failpoints strike where and when they are armed, and production has none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from shared import failpoints
from shared.errors import ConfigError
from shared.failpoints import ENGINE_STEP, ENGINE_TOKEN, SESSION_SEND, UCX_SEND, Fault, Injected


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.armed.clear()


def test_they_are_named_by_point_and_kind() -> None:
    assert failpoints.parse("engine.step=hang:2.5, session.send=drop") == {
        ENGINE_STEP: Fault("hang", 2.5),
        SESSION_SEND: Fault("drop"),
    }
    assert failpoints.parse("engine.token=exit:7") == {ENGINE_TOKEN: Fault("exit", token_id=7)}
    assert failpoints.parse("ucx.send=hang:3@9, session.send=drop@1") == {
        UCX_SEND: Fault("hang", 3.0, num_spared=9),
        SESSION_SEND: Fault("drop", num_spared=1),
    }
    assert failpoints.parse("") == {}


@pytest.mark.parametrize(
    "text",
    [
        "engine.step",
        "engine.step=drop",
        "engine.token=exit",
        "engine.step=hang:soon",
        "loop=hang",
        "=raise",
        "engine.step=hang@-1",
    ],
)
def test_what_is_no_failpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        failpoints.parse(text)
    assert caught.value.field == "failpoints"


def test_production_refuses_them() -> None:
    with pytest.raises(ConfigError, match="production"):
        failpoints.check_allowed("engine.step=hang", production=True)
    assert failpoints.check_allowed("", production=True) == {}
    assert failpoints.check_allowed("engine.step=raise", production=False) == {ENGINE_STEP: Fault("raise")}


def test_visitors_may_be_spared() -> None:
    failpoints.arm({ENGINE_STEP: Fault("raise", num_spared=2)})
    failpoints.strike(ENGINE_STEP)
    failpoints.strike(ENGINE_STEP)
    with pytest.raises(Injected):
        failpoints.strike(ENGINE_STEP)
    assert not failpoints.armed


def test_an_error_strikes_once() -> None:
    failpoints.arm({ENGINE_STEP: Fault("raise")})
    with pytest.raises(Injected):
        failpoints.strike(ENGINE_STEP)
    failpoints.strike(ENGINE_STEP)
    assert not failpoints.armed


def test_a_hang_holds_a_thread_until_its_end() -> None:
    began = time.monotonic()
    failpoints.arm({ENGINE_STEP: Fault("hang", 0.2)})
    threads = [threading.Thread(target=failpoints.strike, args=(ENGINE_STEP,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert time.monotonic() - began >= 0.2
    failpoints.strike(ENGINE_STEP)
    assert not failpoints.armed


async def test_a_frozen_plane_holds_every_send_and_the_loop_goes_on() -> None:
    failpoints.arm({UCX_SEND: Fault("hang", 0.2)})
    sends = [asyncio.create_task(failpoints.strike_async(UCX_SEND)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(send.done() for send in sends)
    assert await asyncio.gather(*sends) == [False] * 3


async def test_one_message_is_dropped() -> None:
    failpoints.arm({SESSION_SEND: Fault("drop")})
    assert [await failpoints.strike_async(SESSION_SEND) for _ in range(2)] == [True, False]
