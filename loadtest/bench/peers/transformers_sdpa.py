"""Hugging Face transformers, called like its own generate: one forward pass for each step, with a growing cache."""

from __future__ import annotations

import time
from typing import Any

from loadtest.bench.peers.adapter import Settings


class TransformersSdpa:
    """See `EngineAdapter`."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.num_threads)
        self._torch: Any = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=torch.bfloat16)

    def describe(self) -> str:
        """See `EngineAdapter`."""
        import transformers

        return f"transformers {transformers.__version__}, {self._model.config._attn_implementation}, bf16"

    def prefill_s(self, prompt: list[int]) -> float:
        """See `EngineAdapter`."""
        start = time.perf_counter()
        self._first_tokens([prompt])
        return time.perf_counter() - start

    def decode_steps_s(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """See `EngineAdapter`."""
        tokens, cache = self._first_tokens(prompts)
        times = []
        for _ in range(num_steps):
            start = time.perf_counter()
            with self._torch.inference_mode():
                output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
                tokens = output.logits[:, -1].float().argmax(-1, keepdim=True)
            times.append(time.perf_counter() - start)
        return times

    def logits(self, prompt: list[int]) -> list[list[float]]:
        """See `EngineAdapter`."""
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([prompt])).logits[0].float().tolist()  # type: ignore[no-any-return]

    def _first_tokens(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            return output.logits[:, -1].float().argmax(-1, keepdim=True), output.past_key_values
