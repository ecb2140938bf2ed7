"""The examples of the pages run against a real cluster, as they stand."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.running import running
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def examples() -> list[str]:
    """Every block of Python that uses the client."""
    pages = [ROOT / "README.md", ROOT / "docs" / "guides" / "clients.md"]
    blocks = [b for page in pages for b in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)]
    return [block for block in blocks if "from tandem import" in block]


async def test_every_example_runs(tmp_path):
    assert len(examples()) == 3
    async with running(tmp_path, num_routers=2) as cluster:
        for example in examples():
            for port, router in zip((50051, 50052), cluster.cluster.routers, strict=True):
                example = example.replace(f'"127.0.0.1:{port}"', f'"{router.grpc}"')
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", example, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
            finally:
                if process.returncode is None:
                    process.kill()
            assert (process.returncode, err) == (0, b"")
            assert out.strip()
        await cluster.idle()
