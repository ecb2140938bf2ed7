"""Drive a decoder over paged KV the way the engine does, and transformers beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView, dtype_name
from shared.model.decoder import Decoder

BLOCK_SIZE = 4


class PagedSequence:
    """One sequence with its own pool of shuffled blocks; unwritten slots hold NaN."""

    def __init__(self, decoder: Decoder, max_tokens: int, kv_dtype: torch.dtype | None = None) -> None:
        self.decoder = decoder
        kv_name = dtype_name(kv_dtype or decoder.dtype)
        layout = decoder.config.block_layout(BLOCK_SIZE, kv_name)
        num_blocks = -(-max_tokens // BLOCK_SIZE) + 3
        self.groups = layout.groups
        self.num_groups, self.num_states = layout.groups.size, layout.num_states
        num_blocks *= self.num_groups
        # Numbers of all bits set are NaN, and so are scales.
        self.pool = PoolView.of(torch.full(layout.shape(num_blocks), 255, dtype=torch.uint8), layout)
        self.table = random.Random(0).sample(range(num_blocks), num_blocks)
        self.kv_len = 0

    def step(self, token_ids: Sequence[int], rope_length: int) -> Tensor:
        """Feed tokens; returns [len(token_ids), vocab_size] logits."""
        start, self.kv_len = self.kv_len, self.kv_len + len(token_ids)
        first, *later = (
            AttentionBatch.from_lists(
                [len(token_ids)], [self.kv_len], [self.table[group :: self.num_groups]], BLOCK_SIZE
            )
            for group in range(self.num_groups - self.num_states)
        )
        batch = first.with_groups(later) if self.num_groups > 1 else first
        if self.num_states:
            blocks = torch.tensor([self.groups.state_blocks(self.table, start, self.kv_len)], dtype=torch.int32)
            batch = replace(batch, state_blocks=blocks)
        return self.decoder.forward(
            torch.tensor(token_ids),
            torch.arange(start, self.kv_len),
            self.pool,
            batch,
            torch.arange(len(token_ids)),
            torch.full((len(token_ids),), rope_length) if self.decoder.rotary.needs_lengths else None,
        )


def prompt_logits(
    decoder: Decoder, token_ids: Sequence[int], chunk_len: int, kv_dtype: torch.dtype | None = None
) -> Tensor:
    """Logits of all prompt tokens, [num_tokens, vocab_size], computed in chunks."""
    sequence = PagedSequence(decoder, len(token_ids), kv_dtype)
    bounds = [*range(0, len(token_ids), chunk_len), len(token_ids)]
    return torch.cat([sequence.step(token_ids[a:b], len(token_ids)) for a, b in pairwise(bounds)])


def greedy(
    decoder: Decoder, prompt: Sequence[int], num_tokens: int, kv_dtype: torch.dtype | None = None
) -> tuple[list[int], Tensor]:
    """Greedy continuation and the logits it was chosen from, [num_tokens, vocab_size]."""
    sequence = PagedSequence(decoder, len(prompt) + num_tokens, kv_dtype)
    rows = [sequence.step(prompt, len(prompt))[-1]]
    tokens = [int(rows[-1].argmax())]
    while len(tokens) < num_tokens:
        rows.append(sequence.step(tokens[-1:], sequence.kv_len + 1)[-1])
        tokens.append(int(rows[-1].argmax()))
    return tokens, torch.stack(rows)


def load_oracle(folder: Path) -> PreTrainedModel:
    """The same checkpoint in transformers, fp32, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Logits of all tokens read at once, [num_tokens, vocab_size]."""
    model(torch.tensor([[0]]))  # a short input makes dynamic rotary positions forget an earlier, longer one
    return model(torch.tensor([token_ids])).logits[0]


@torch.no_grad()
def oracle_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy continuation by `generate`, and its logits, [num_tokens, vocab_size]."""
    model(torch.tensor([[0]]))
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)
