"""A batch through a real cluster outlives each of its processes: each line has one answer."""

from __future__ import annotations

import json

import openai
import pytest

from tests.e2e.running import PatientCommands, running
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow
NUM_LINES = 60


class FewAtOnce(PatientCommands):
    """A router that answers two lines at once: most are open when it is killed."""

    def router(self, *arguments, **named):
        return [*super().router(*arguments, **named), "--edge.batch.max-parallel", "2"]


def line(number: int) -> str:
    body = {"model": "demo", "prompt": f"Verse {number}: and", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body})


@pytest.mark.parametrize("victim", ["router", "prefill-0", "decode-0", "kvstore", "valkey"])
async def test_a_killed_process_loses_no_line_and_answers_none_twice(tmp_path, victim):
    async with running(tmp_path, kind=FewAtOnce, num_prefill=1, num_decode=1, restart=True) as cluster:

        async def asked(call):
            """What the call returns; None while the router or its records are not there."""
            try:
                return await call
            except (openai.APIConnectionError, openai.InternalServerError):
                return None

        client = openai.AsyncOpenAI(
            base_url=f"http://{cluster.cluster.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )
        content = "\n".join(line(i) for i in range(NUM_LINES)).encode()
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        async def has_some():
            now = await client.batches.retrieve(batch.id)
            assert now.status in ("validating", "in_progress"), "it is over before a process is killed"
            return now.request_counts.completed >= 3

        await until(has_some)
        name = cluster.cluster.routers[0].name if victim == "router" else victim
        cluster.signal(name)
        assert await cluster.restarted(name) == "SIGKILL"

        async def is_done():
            now = await asked(client.batches.retrieve(batch.id))
            return now if now is not None and now.status == "completed" else None

        done = await until(is_done)
        assert done.error_file_id is None
        assert done.request_counts.completed == NUM_LINES
        answers = [json.loads(text) for text in (await client.files.content(done.output_file_id)).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"c{i}" for i in range(NUM_LINES)]
        assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 48 for answer in answers)
        await cluster.idle()
        await client.close()
