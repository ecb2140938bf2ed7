"""Workers whose steps take a given time and compute nothing: placed, handed over and streamed as any others."""

from __future__ import annotations

import json

from services.worker.host import TIMED_ANSWER
from shared.model.text.tokenizer import Tokenizer
from tests.e2e.running import BLOCK_SIZE, DEMO, block_bytes, loads, running

TIMES = {"fixed_s": 1e-3, "read_s": 2e-3, "token_s": 1e-5, "sequence_s": 0.0, "kv_s": 1e-8, "attention_s": 1e-9}
PROMPT = list(range(20, 120))
NUM_TOKENS = 40
NUM_PROMPT_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)


async def test_an_answer_has_every_token_and_its_blocks_cross_the_pools(tmp_path):
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"step_times": TIMES}))
    answer = Tokenizer.load(DEMO).encode(TIMED_ANSWER)
    async with running(tmp_path, device=f"timed:{times}") as cluster:
        found = await cluster.tokens(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert found == [answer[(len(PROMPT) + i) % len(answer)] for i in range(NUM_TOKENS)]
        await cluster.until(
            lambda status: loads(status)["decode-0"].kv_bytes_received == NUM_PROMPT_BLOCKS * block_bytes(DEMO)
        )
