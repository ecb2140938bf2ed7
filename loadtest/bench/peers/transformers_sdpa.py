"""Hugging Face transformers, called like its own generate: one forward pass for each step, with a growing cache."""

from __future__ import annotations

import time
from typing import Any

from loadtest.bench.peers.adapter import Settings

EMBEDDED_TOGETHER = 32
"""Texts of a batch, the default of sentence-transformers."""


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

    def embed_s(self, prompts: list[list[int]]) -> float:
        """See `Embeds`: batches of 32 texts, the longest first, padded, as sentence-transformers makes them."""
        start = time.perf_counter()
        longest_first = sorted(prompts, key=len, reverse=True)
        for begin in range(0, len(prompts), EMBEDDED_TOGETHER):
            self._embed(longest_first[begin : begin + EMBEDDED_TOGETHER])
        return time.perf_counter() - start

    def logits(self, prompt: list[int]) -> list[list[float]]:
        """See `EngineAdapter`."""
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([prompt])).logits[0].float().tolist()  # type: ignore[no-any-return]

    def _embed(self, prompts: list[list[int]]) -> Any:
        size = max(map(len, prompts))
        with self._torch.inference_mode():
            ids = self._torch.tensor([prompt + [0] * (size - len(prompt)) for prompt in prompts])
            ends = self._torch.tensor([len(prompt) for prompt in prompts])
            mask = (self._torch.arange(size) < ends[:, None]).long()
            hidden = self._model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            return hidden[self._torch.arange(len(prompts)), ends - 1].float()

    def _first_tokens(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            return output.logits[:, -1].float().argmax(-1, keepdim=True), output.past_key_values
