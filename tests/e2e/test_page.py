"""The page in a real Chromium, over a real cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.running import running
from tests.page.browser import browser, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
RED = "return [...document.querySelectorAll('.worker.bad h4')].some((one) => one.textContent === arguments[0])"
UP = "return [...document.querySelectorAll('.worker.good h4')].some((one) => one.textContent === arguments[0])"


async def test_figures_move_under_load_and_a_killed_worker_turns_red_and_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, num_decode=2, restart=True) as run, browser() as window:
        await window.open(f"http://{run.cluster.http}/")
        await window.until(UP, "decode-1")
        before = await window.text("#tiles")
        load = asyncio.gather(*(run.complete(f"{number} foxes", max_tokens=60) for number in range(6)))
        await window.type("#prompt", "Tell me of a fox")
        await window.click("#send")
        await window.until("return document.querySelector('.end .legend li')")
        assert len(await window.text(".said.assistant")) > 0
        await load
        await window.until("return document.querySelector('#requests tbody tr.ended')")
        await window.until("return document.querySelector('#tiles').textContent !== arguments[0]", before)
        link = next(w for w in (await run.status()).workers if w.worker.name == "decode-1")
        assert link.connected
        run.signal("decode-1")
        await run.until(lambda status: any(not w.connected for w in status.workers))
        await window.until(RED, "decode-1")
        await window.until(UP, "decode-1")
        assert await window.complaints() == []
