"""A cluster whose router takes its workers from a file: one leaves in the middle of an answer, and costs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import ClusterSpec
from tests.e2e.running import DEMO, Running

PROMPT = [20 + (i * 37) % 2000 for i in range(75)]
FIELDS = {"max_tokens": 600, "ignore_eos": True}


class WithFile(TandemCommands):
    """Gives the router a file in place of the flags."""

    def __init__(self, spec: ClusterSpec, path: Path) -> None:
        super().__init__(spec)
        self._path = path

    def router(self, workers, kvstore, stores="", number=0):
        self._workers = workers
        self.name(*workers["prefill"], *workers["decode"])
        return [*super().router({}, kvstore, stores), "--workers-file", str(self._path)]

    def name(self, *names: str) -> None:
        """From now on these are the workers."""
        entries = [
            {"name": name, "role": str(role), "address": address}
            for role, pool in self._workers.items()
            for name, address in pool.items()
            if name in names
        ]
        beside = self._path.with_suffix(".new")
        beside.write_text(yaml.safe_dump({"workers": entries}))
        beside.replace(self._path)


async def test_a_decode_worker_that_leaves_the_file_in_mid_answer_finishes_it_and_gets_no_more(tmp_path):
    spec = ClusterSpec(
        model=DEMO, http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=tmp_path,
        num_prefill=1, num_decode=2, num_kv_blocks=256, dtype="fp32",
    )  # fmt: skip
    commands = WithFile(spec, tmp_path / "workers.yaml")
    async with LocalCluster(spec, commands=commands) as cluster:
        run = Running(cluster)
        try:
            await run.until(lambda status: status.ready and all(w.connected for w in status.workers))
            expected = await run.tokens(PROMPT, **FIELDS)
            tokens: list[int] = []
            other = ""
            body = {"prompt": PROMPT, "temperature": 0, "stream": True, "return_token_ids": True, **FIELDS}
            async with run.http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        tokens += choice.get("token_ids") or []
                    if len(tokens) >= 20 and not other:
                        status = await run.status()
                        names = [w.worker.name for w in status.workers if w.worker.name.startswith("decode")]
                        (busy,) = [w.worker.name for w in status.workers if w.num_requests and w.worker.name in names]
                        (other,) = set(names) - {busy}
                        commands.name("prefill-0", other)
            assert tokens == expected
            status = await run.until(lambda status: len(status.workers) == 2)
            assert ([w.worker.name for w in status.workers], list(status.degraded)) == (["prefill-0", other], [])
            assert await run.tokens(PROMPT, **FIELDS) == expected
            commands.name("prefill-0")
            status = await run.until(lambda status: not status.ready)
            assert status.not_ready_reason == "no decode worker is known"
            commands.name("prefill-0", busy, other)
            await run.until(lambda status: status.ready and len(status.workers) == 3)
            assert await run.tokens(PROMPT, **FIELDS) == expected
        finally:
            await run.close()
