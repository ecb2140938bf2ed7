"""The page over a real cluster: figures move under load, a worker's process dies, and another one takes its place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.running import Running, running
from tests.page.browser import Browser, browser, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
"""Within this the page shows on a quiet machine that a worker is lost."""
PILL = """
return [...document.querySelectorAll('.worker')].find((one) => one.querySelector('h4').textContent === 'decode-0')
  ?.querySelector('.pill').textContent.includes(arguments[0])
"""
WATCH = """
window.lostAt = 0;
new MutationObserver((_, watch) => {
  if (!document.querySelector('.worker.bad')) return;
  window.lostAt = performance.now();
  watch.disconnect();
}).observe(document.getElementById('workers'), { subtree: true, childList: true, attributes: true });
return performance.now();
"""


async def lost_s(window: Browser, cluster: Running) -> float:
    """Kills the decode worker and waits until another one is in its place. Seconds by the page's clock until it shows
    the loss, what chromedriver takes included."""
    pid = cluster.pid("decode-0")
    killed_at = await window.run(WATCH)
    cluster.signal("decode-0")
    lost_at = await window.until("return window.lostAt")
    await window.until(PILL, "lost")
    await window.until(PILL, "up")
    assert cluster.pid("decode-0") != pid
    assert await window.run("return document.querySelectorAll('.worker.bad').length") == 0
    return (lost_at - killed_at) / 1e3


async def test_figures_move_under_load_and_a_killed_worker_is_shown_as_lost_until_it_is_back(tmp_path: Path) -> None:
    async with running(tmp_path, restart=True) as cluster, browser() as window:
        await window.open(f"http://{cluster.cluster.http}/")
        await window.until(PILL, "up")
        before = await window.text("#tiles")
        load = asyncio.gather(*(cluster.complete(f"{number} foxes", max_tokens=60) for number in range(6)))
        await window.type("#prompt", "Tell me of a fox")
        await window.click("#send")
        await window.until("return document.querySelector('.end .legend li')")
        assert len(await window.text(".said.assistant")) > 0
        await load
        await window.until("return document.querySelector('#requests tbody tr.ended')")
        await window.until("return document.querySelector('#tiles').textContent !== arguments[0]", before)
        await lost_s(window, cluster)
        assert (await cluster.complete("Once", max_tokens=2))["choices"][0]["token_ids"]
        assert await window.complaints() == []
