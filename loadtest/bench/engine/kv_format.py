"""What KV in bf16 costs a model that computes in fp32: how far its logits move, and which greedy tokens change."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.registry import AUTO
from shared.model.decoder import Decoder
from shared.model.tokenizer import Tokenizer

BLOCK_SIZE = 16
OPENINGS = (
    "Once upon a time", "In the morning", "Nobody knew why", "Long ago in a village",
    "After the storm", "The letter said that", "Every winter", "At the end of the road",
)  # fmt: skip
SUBJECTS = (
    "an old king", "the little fox", "a young girl", "her brother", "the teacher", "a ship", "the river", "my friend",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """bf16 KV beside fp32 KV. Differences of logits are shares of the standard deviation of the fp32 logits."""

    kernels: str
    num_prompts: int
    num_tokens: int
    """Of each answer."""
    block_bytes: tuple[int, int]
    """(fp32, bf16)."""
    max_difference: float
    mean_difference: float
    same_argmax: float
    """Share of the positions, over the same tokens, where both have the same most likely token."""
    same_answers: int
    """Prompts whose free-running greedy answers are equal to the last token."""
    same_tokens: float
    """Share of the answers' tokens that lie before the first difference."""


class Run:
    """Prompts that run together over a pool of one KV dtype."""

    def __init__(self, decoder: Decoder, kv_dtype: str, num_seqs: int, max_len: int) -> None:
        layout = decoder.config.block_layout(BLOCK_SIZE, kv_dtype)
        width = -(-max_len // BLOCK_SIZE)
        self.block_bytes = layout.block_bytes
        self._decoder = decoder
        self._kv_blocks = torch.zeros(layout.shape(num_seqs * width), dtype=getattr(torch, kv_dtype))
        self._tables = [list(range(i * width, (i + 1) * width)) for i in range(num_seqs)]

    def step(self, new: list[list[int]], lens: list[int]) -> Tensor:
        """Computes each sequence's new tokens, its last ones of `lens`: [num_tokens, vocab_size] logits."""
        counts = [len(tokens) for tokens in new]
        batch = AttentionBatch.from_lists(counts, lens, self._tables, BLOCK_SIZE)
        positions = torch.cat([torch.arange(end - n, end) for n, end in zip(counts, lens, strict=True)])
        tokens = torch.tensor([token for part in new for token in part])
        rows = torch.arange(batch.num_tokens)
        return self._decoder.forward(tokens, positions, self._kv_blocks, batch, rows)

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Answers of `num_tokens` tokens, whatever their end."""
        lens = [len(prompt) for prompt in prompts]
        ends = [end - 1 for end in accumulate(lens)]
        columns = [self.step(prompts, lens)[ends].argmax(dim=-1).tolist()]
        while len(columns) < num_tokens:
            lens = [length + 1 for length in lens]
            columns.append(self.step([[token] for token in columns[-1]], lens).argmax(dim=-1).tolist())
        return [list(answer) for answer in zip(*columns, strict=True)]


@torch.inference_mode()
def compare(folder: Path, num_tokens: int, kernels: str = AUTO) -> Outcome:
    """Answers to every opening with every subject, by both formats. Raises ModelLoadError."""
    decoder = Decoder.load(folder, torch.float32, "cpu", kernels=kernels)
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.encode(f"{opening} {subject}") for opening, subject in product(OPENINGS, SUBJECTS)]
    longest = max(map(len, prompts)) + num_tokens
    wide, narrow = (Run(decoder, dtype, len(prompts), longest) for dtype in ("float32", "bfloat16"))
    answers, others = wide.greedy(prompts, num_tokens), narrow.greedy(prompts, num_tokens)
    same = [
        next((i for i, (a, b) in enumerate(zip(answer, other, strict=True)) if a != b), num_tokens)
        for answer, other in zip(answers, others, strict=True)
    ]
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    expected, found = (run.step(whole, [len(tokens) for tokens in whole]) for run in (wide, narrow))
    difference = (found - expected).abs() / expected.std()
    return Outcome(
        kernels=decoder.kernels.name,
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        block_bytes=(wide.block_bytes, narrow.block_bytes),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        same_argmax=float((found.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean()),
        same_answers=same.count(num_tokens),
        same_tokens=sum(same) / (num_tokens * len(prompts)),
    )


def main(
    model: Annotated[Path, typer.Option(help="Model folder in Hugging Face layout.")] = Path("models/demo"),
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    kernels: Annotated[str, typer.Option(help="cpu, torch or auto.")] = AUTO,
) -> None:
    """Prints the comparison as JSON."""
    print(json.dumps(asdict(compare(model, num_tokens, kernels)), indent=2))


if __name__ == "__main__":
    typer.run(main)
