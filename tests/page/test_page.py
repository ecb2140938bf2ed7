"""The page in a real Chromium, over a front door whose figures the test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tests.page.browser import ENTER, ESCAPE, TAB, Browser, browser, missing
from tests.page.staged import Staged, detail, row, staged, status, worker

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="module"),
]
POLLED = "return Number(document.body.dataset.polled || 0) > arguments[0]"
HOSTILE = "<img src=x onerror=\"document.body.dataset.hit='1'\"><script>document.body.dataset.hit='2'</script>'\"&amp;"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window() -> AsyncIterator[Browser]:
    async with browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def front() -> AsyncIterator[Staged]:
    async with staged() as served:
        yield served


async def show(window: Browser, front: Staged) -> None:
    await window.emulate(1280, 900)
    await window.open(front.url)
    await window.complaints()  # of the page before, whose server is gone
    await window.until(POLLED, 0)


async def test_figures_change_with_what_the_router_says(window: Browser, front: Staged) -> None:
    await show(window, front)
    assert await window.text("#model") == "acme/tiny"
    assert "KV room: it cost 7 of 40 requests" in await window.text("#binds")
    front.view.now = status()
    front.view.now.flow.num_decoding = 73
    front.view.now.workers[3].connected = False
    await window.until("return [...document.querySelectorAll('#flow .figure')].some((one) => one.textContent === '73')")
    await window.until(
        "return [...document.querySelectorAll('.worker.bad .pill')].some((one) => one.textContent.includes('lost'))"
    )
    front.view.now.workers[3].connected = True
    await window.until("return document.querySelectorAll('.worker.bad').length === 0")
    assert await window.complaints() == []


async def test_an_answer_streams_and_shows_where_its_first_tokens_time_went(window: Browser, front: Staged) -> None:
    await show(window, front)
    await window.type("#prompt", "Tell me of a fox")
    await window.click("#send")
    await window.until("return document.querySelector('.end')")
    assert "Once there was a fox" in await window.text(".said.assistant")
    assert "p0 → d0" in await window.text(".end")
    assert "queue 1.5 ms" in await window.text(".end .legend")
    assert await window.complaints() == []


async def test_hostile_names_stay_text(window: Browser) -> None:
    async with staged(model="acme/tiny") as front:
        front.view.now = status(HOSTILE, HOSTILE)
        front.view.now.degraded.append(HOSTILE)
        front.view.now.window.binding = front.view.now.window.causes[0].cause = HOSTILE
        front.view.rows = [row(HOSTILE, HOSTILE, prefill_worker=HOSTILE, lost_to=HOSTILE, error=HOSTILE)]
        front.view.details[HOSTILE] = detail(HOSTILE, HOSTILE)
        await show(window, front)
        await window.until("return document.querySelector('#requests tbody button')")
        await window.click("#requests tbody button")
        await window.until("return document.querySelector('#detail-body table')")
        await window.until(POLLED, 2)
        assert await window.run("return document.body.dataset.hit") is None
        assert await window.run("return document.querySelectorAll('img').length") == 0
        assert await window.text("#model") == HOSTILE
        assert await window.text("#detail-title") == HOSTILE
        assert await window.complaints() == []


async def test_what_is_listed_twice_or_no_longer_is_shown_as_it_is(window: Browser, front: Staged) -> None:
    await show(window, front)
    cards = "return document.querySelectorAll('.worker').length === arguments[0]"
    twin = inference_pb2.WorkerStatus()
    twin.CopyFrom(front.view.now.workers[0])
    front.view.now.workers.append(twin)
    await window.until(cards, 5)
    polled = int(await window.run("return document.body.dataset.polled"))
    await window.until(POLLED, polled + 2)
    assert await window.run(cards, 5)
    front.view.now.workers.pop()
    await window.until(cards, 4)
    await window.until("return document.querySelector('#requests tbody button')")
    front.view.rows = []
    await window.until("return !document.querySelector('#requests tbody button')")
    assert await window.complaints() == []


async def test_it_asks_again_where_the_question_is_closed_and_takes_no_key_that_no_header_could_bring(
    window: Browser,
) -> None:
    async with staged(api_keys=("right",)) as front:
        await window.open(front.url)
        asks = "return document.getElementById('ask').open"
        await window.until(asks)
        for _ in range(3):
            await window.press(ESCAPE)
            await window.until(asks)
        await window.type("#key", "sk–" + ENTER)
        assert await window.run(asks)
        assert await window.run("return sessionStorage.length") == 0
        await window.run("document.getElementById('key').value = ''")
        await window.type("#key", "right" + ENTER)
        await window.until(POLLED, 0)
        await window.run("sessionStorage.clear()")


async def test_it_asks_for_a_key_and_keeps_it_in_this_tab(window: Browser) -> None:
    async with staged(api_keys=("right",)) as front:
        await window.open(front.url)
        await window.until("return document.getElementById('ask').open")
        await window.type("#key", "wrong" + ENTER)
        await window.until("return document.getElementById('ask-error').textContent.includes('does not know')")
        await window.type("#key", "right" + ENTER)
        await window.until(POLLED, 0)
        assert await window.text("#model") == "acme/tiny"
        assert await window.run("return localStorage.length + document.cookie.length") == 0
        await window.open(front.url)
        await window.until(POLLED, 0)
        await window.run("sessionStorage.clear()")


async def test_everything_is_reached_and_used_with_the_keyboard(window: Browser, front: Staged) -> None:
    await show(window, front)
    seen: list[str] = []
    for _ in range(80):
        await window.press(TAB)
        found = await window.run(
            "const at = document.activeElement;"
            "const box = at.getBoundingClientRect();"
            "const style = getComputedStyle(at).outlineStyle;"
            "return [at.id || at.textContent.slice(0, 20), style, at.matches(':focus-visible'), box.width]"
        )
        name, outline, is_visible, width = found
        if is_visible:
            assert outline != "none", found
            assert width > 0, found
        if name in seen and len(seen) > 12:
            break
        seen.append(name)
    assert [name for name in seen if name in ("window", "chat-log", "prompt", "send", "curl", "copy")] == [
        "window",
        "chat-log",
        "prompt",
        "send",
        "curl",
        "copy",
    ]
    assert "request-0" in seen
    await window.run(
        "[...document.querySelectorAll('#requests button')].find((one) => one.textContent === 'request-0').focus()"
    )
    await window.press(ENTER)
    await window.until("return document.querySelector('#detail-body h3')")
    await window.run("document.getElementById('detail-close').focus()")
    await window.press(ENTER)
    await window.until("return !document.getElementById('detail').open")
    assert await window.run("return document.activeElement.textContent") == "request-0"


async def test_it_fits_a_phone_and_every_field_has_a_name(window: Browser, front: Staged) -> None:
    await show(window, front)
    for width in (360, 420, 768, 1280):
        await window.emulate(width, 780, scheme="dark", motion="reduce")
        polled = int(await window.run("return document.body.dataset.polled"))
        await window.until(POLLED, polled + 1)
        assert await window.run("return document.documentElement.scrollWidth <= innerWidth"), width
    nameless = await window.run(
        "return [...document.querySelectorAll('button, input, select, textarea')]"
        ".filter((one) => !(one.labels?.length || one.textContent.trim() || one.ariaLabel)).map((one) => one.outerHTML)"
    )
    assert nameless == []
    assert await window.run("return document.querySelectorAll('main, header, footer, h1').length") == 4


async def test_an_elastic_pool_shows_what_each_worker_is_for_and_the_pairs_of_a_request(
    window: Browser, front: Staged
) -> None:
    now = status()
    now.mode = "auto"
    now.window.split.MergeFrom(
        inference_pb2.SplitVerdict(
            num_workers=4, num_decoding=3, headroom=0.9, best_decoding=2, best_headroom=1.2, elastic=True, worth_it=True
        )
    )
    now.split.MergeFrom(inference_pb2.RoleSplit(num_decoding=3, num_workers=4, headroom=1.25, num_flips=2))
    for each in now.workers:
        each.preference = types_pb2.WORKER_ROLE_DECODE
        each.role = types_pb2.WORKER_ROLE_DECODE
    now.workers[0].preference = types_pb2.WORKER_ROLE_PREFILL
    front.view.now = now
    pairs = [
        inference_pb2.PlacementPair(
            decode_worker="decode-0", prefill_worker=other, ttft_ms=ttft_ms, tpot_ms=20, score=0.5
        )
        for other, ttft_ms in (("prefill-0", 120.0), ("decode-0", None))
    ]
    told = detail("request-0")
    told.explanation.attempts[0].MergeFrom(inference_pb2.PlacementDecision(route="same_worker", pairs=pairs))
    front.view.details["request-0"] = told
    await show(window, front)
    assert "Elastic pool 3 of 4 decode, the others only prefill; headroom 1.25" in await window.text("#workers")
    assert (await window.text("#workers")).count("only prefills now") == 1
    assert "With 2 of 4 workers decoding, prompts beside answers" in await window.text("#better-split")
    notes = await window.run("return [...document.querySelectorAll('#flow .note')].map((one) => one.textContent)")
    assert {"1 of 1 workers", "3 of 3 workers"} <= set(notes)
    await window.run(
        "[...document.querySelectorAll('#requests button')].find((one) => one.textContent === 'request-0').click()"
    )
    await window.until("return document.querySelectorAll('#detail-body table').length === 2")
    shown = await window.run("return [...document.querySelectorAll('#detail-body table')][1].textContent")
    assert "120 ms" in shown
    assert "here–" in shown
    await window.run("document.getElementById('detail').close()")
    assert await window.complaints() == []


async def test_a_router_that_ends_is_told(window: Browser) -> None:
    async with staged() as front:
        front.view.now.workers.append(worker("decode-2", types_pb2.WORKER_ROLE_DECODE, draining=True))
        await show(window, front)
        assert "draining" in await window.text("#workers")
    await window.until("return document.getElementById('state').textContent.includes('no answer')")
