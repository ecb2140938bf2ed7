"""Embeddings through a real cluster: those of transformers, by the prefill pool alone."""

from __future__ import annotations

import os

import numpy as np
import openai
import pytest
import torch

from shared.model.text.tokenizer import Tokenizer
from tests.e2e.running import DEMO, PatientCommands, loads, running
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow
TEXTS = ["And Noah built an altar.", "x", "In the beginning God created the heaven and the earth. " * 60]


def expected(pooling: str) -> list[np.ndarray]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel

    model, tokenizer = AutoModel.from_pretrained(DEMO, dtype=torch.float32).eval(), Tokenizer.load(DEMO)
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            states = model(torch.tensor([list(tokenizer.encode(text))])).last_hidden_state[0].numpy()
        vector = states[-1] if pooling == "last" else states.mean(axis=0)
        found.append(vector / np.linalg.norm(vector))
    return found


@pytest.mark.parametrize(
    ("pooling", "mode"), [("last", "disaggregated"), ("mean", "disaggregated"), ("mean", "collocated")]
)
async def test_embeddings_are_those_of_transformers_and_nothing_is_shipped(tmp_path, pooling, mode):
    class Commands(PatientCommands):
        def router(self, *arguments, **named):
            return [*super().router(*arguments, **named), "--edge.pooling", pooling]

    pools = {"num_prefill": 2, "num_decode": 1} if mode == "disaggregated" else {"num_prefill": 0, "num_decode": 1}
    async with running(tmp_path, kind=Commands, mode=mode, **pools) as cluster:
        client = openai.AsyncOpenAI(
            base_url=f"http://{cluster.cluster.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )
        for _ in range(2):  # the second time with a prefix that is cached
            answer = await client.embeddings.create(model="demo", input=TEXTS, encoding_format="float")
            for item, wanted in zip(answer.data, expected(pooling), strict=True):
                np.testing.assert_allclose(item.embedding, wanted, atol=1e-4)
        body = {"query": TEXTS[0], "documents": [TEXTS[2], TEXTS[0]]}
        ranked = (await cluster.http.post("/v1/rerank", json=body)).json()["results"]
        assert ranked[0]["index"] == 1
        assert ranked[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
        status = await cluster.idle()
        assert loads(status)["decode-0"].kv_bytes_received == 0
        await client.close()
