"""The page over a real cluster: a worker's process dies, and another one takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.running import running
from tests.page.browser import Browser, browser, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
LOST_S = 3.0
"""Within this the page shows that a worker is lost."""
TRIES = 3
"""Of which one has to: a machine that does other work may stand still for longer than that."""
BACK_S = 180.0
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


async def lost_s(window: Browser, pid: int) -> float:
    """Kills the worker. Seconds by the page's clock until it shows that, what chromedriver takes included."""
    killed_at = await window.run(WATCH)
    os.kill(pid, signal.SIGKILL)
    lost_at = await window.until("return window.lostAt")
    await window.until(PILL, "lost")
    return (lost_at - killed_at) / 1e3


async def test_a_killed_worker_is_shown_as_lost_and_as_well_again_once_it_is_back(tmp_path: Path) -> None:
    async with running(tmp_path, restart=True) as cluster, browser() as window:
        await window.open(f"http://{cluster.cluster.http}/")
        await window.until(PILL, "up")
        took = []
        while not took or (took[-1] > LOST_S and len(took) < TRIES):
            pid = cluster.pid("decode-0")
            took.append(await lost_s(window, pid))
            await window.until(PILL, "up", within_s=BACK_S)
            assert cluster.pid("decode-0") != pid
            assert await window.run("return document.querySelectorAll('.worker.bad').length") == 0
        assert min(took) <= LOST_S, took
        assert (await cluster.complete("Once", max_tokens=2))["choices"][0]["token_ids"]
