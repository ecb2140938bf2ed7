"""A real headless Chromium, driven over the W3C WebDriver protocol of its own chromedriver."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.waiting import DEADLINE_S

ATTEMPTS = 5
"""To start chromedriver."""
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
TAB, ENTER, ESCAPE = "\ue004", "\ue007", "\ue00c"


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} missing: apt-get install chromium chromium-driver" if lacking else ""


class Browser:
    """One window."""

    def __init__(self, client: httpx.AsyncClient, session: str) -> None:
        self._client = client
        self._session = f"/session/{session}"

    async def open(self, url: str) -> None:
        await self._post("url", url=url)

    async def run(self, script: str, *arguments: object) -> Any:
        """The value that a script returns, awaited where it is a promise."""
        return await self._post("execute/sync", script=script, args=list(arguments))

    async def until(self, script: str, *arguments: object) -> Any:
        """Runs a script until it returns something true, and returns that."""
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                while not (found := await self.run(script, *arguments)):
                    await asyncio.sleep(0.02)
                return found
        text = await self.run("return document.body.innerText.slice(0, 1500)")
        logs = await self._post("se/log", type="browser")
        raise AssertionError(f"{script} stayed {found!r}; the page: {text}\n{logs}")

    async def text(self, selector: str) -> str:
        return str(await self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    async def click(self, selector: str) -> None:
        await self._post(f"element/{await self._find(selector)}/click")

    async def type(self, selector: str, text: str) -> None:
        await self._post(f"element/{await self._find(selector)}/value", text=text)

    async def press(self, key: str) -> None:
        """Whatever has the focus gets it."""
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        await self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    async def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        entries = await self._post("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    async def emulate(self, width: int, height: int, *, scheme: str = "light", motion: str = "no-preference") -> None:
        """Another screen, in CSS pixels, and what its user prefers."""
        await self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self._command("Emulation.setEmulatedMedia", features=features)

    async def _find(self, selector: str) -> str:
        return str((await self._post("element", using="css selector", value=selector))[_ELEMENT])

    async def _command(self, name: str, **parameters: object) -> Any:
        return await self._post("goog/cdp/execute", cmd=name, params=parameters)

    async def _post(self, path: str, **body: object) -> Any:
        answer = await self._client.post(f"{self._session}/{path}", json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Starts chromedriver on a free port and one window, and ends both."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process, port = await asyncio.wait_for(_serving(driver), DEADLINE_S)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
                arguments = [
                    "--headless=new",
                    "--no-sandbox",  # as root there is none
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                    "--disable-background-networking",
                    "--hide-scrollbars",
                    "--window-size=1280,900",
                    f"--user-data-dir={folder}",
                ]
                options = {"args": arguments, "binary": chromium}
                wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                answer = await client.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
                assert answer.status_code == 200, answer.text
                session = answer.json()["value"]["sessionId"]
                try:
                    yield Browser(client, session)
                finally:
                    await client.delete(f"/session/{session}")
        finally:
            process.terminate()
            await process.wait()


async def _serving(driver: str) -> tuple[asyncio.subprocess.Process, int]:
    """A chromedriver and its port. It takes a free one of IPv4, and ends where another process has the same of IPv6."""
    said: list[str] = []
    for _ in range(ATTEMPTS):
        process = await asyncio.create_subprocess_exec(
            driver, "--port=0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                said.append(line.decode().rstrip(".\n"))
                if "successfully" in said[-1]:
                    return process, int(said[-1].split()[-1])
        except asyncio.CancelledError:
            process.kill()
            raise
        await process.wait()
    raise AssertionError(f"chromedriver ended before it served: {said}")
