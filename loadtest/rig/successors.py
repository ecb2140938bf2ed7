"""Models that give each token the one behind it in the vocabulary, and texts for them.

Engines are compared by what their guesses gain, so they must give the same answers, and to a prompt that has as much
of them as real ones have. No model with random weights does. So all layers of these are random and are computed in
full, but what they add to a token's embedding is small, and the output projection gives each embedding the next token.
In any precision of the weights the greedy answer is then a run of token ids, whatever the prompt says before its last
token.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loadtest.rig.models import checkpoint
from loadtest.workloads.synthetic import FIRST_ANSWERED as FIRST
from shared.model.text.tokenizer import Tokenizer

LESS = 0.01
"""Factor on the layers' last projections, so that layers add little to an embedding."""
_WRITTEN = "successors"
_VOCAB_SIZE = 32_000
"""Of the shapes with plain layers."""


def successors(shape: str, wrong: float = 0.0) -> Path:
    """The folder of `write_successors` of a shape with plain layers, in the user's cache."""
    plain = checkpoint(shape)
    folder = plain.with_name(f"{shape}-successors" + (f"-{wrong:g}" if wrong else ""))
    write_successors(plain, folder, wrong)
    return folder


def write_successors(plain: Path, folder: Path, wrong: float = 0.0) -> None:
    """Makes such a model of a checkpoint with random weights, unless it exists. `wrong`: the share of tokens, by
    chance, behind which it gives the one after the next."""
    if (folder / _WRITTEN).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    files = sorted(plain.glob("*.safetensors"))
    embedding = next(found for file in files if (found := load_file(file).get("model.embed_tokens.weight")) is not None)
    for file in files:
        tensors = {name: _changed(name, tensor, embedding, wrong) for name, tensor in load_file(file).items()}
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    (folder / _WRITTEN).touch()


def _changed(name: str, tensor: Tensor, embedding: Tensor, wrong: float) -> Tensor:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return tensor * LESS
    if name != "lm_head.weight":
        return tensor
    generator, (vocab_size, hidden_size) = random.Random(0), tensor.shape
    behind = [(token + 1 + (generator.random() < wrong)) % vocab_size for token in range(vocab_size)]
    found = torch.zeros(tensor.shape).index_add_(0, torch.tensor(behind), embedding.float() / hidden_size**0.5)
    return found.to(tensor.dtype)


def as_successors(tokenizer: Tokenizer, prompt: str, answer: str, prompt_len: int, num_tokens: int) -> list[int]:
    """A prompt for such a model that repeats as much of its answer, FIRST, FIRST + 1, …, as `prompt` does of `answer`.

    Runs of tokens that both texts have, the longest first, become the answer's tokens at the same places; all other
    tokens of the prompt are different ones that no answer has. It has at most `prompt_len` tokens, and the answer
    `num_tokens`.
    """
    theirs = tokenizer.encode(answer, add_special_tokens=False)[:num_tokens]
    found = _others(prompt_len, num_tokens)
    text = tokenizer.encode(prompt)[: prompt_len - 1]
    for run in difflib.SequenceMatcher(None, text, theirs, autojunk=False).get_matching_blocks():
        found[run.a : run.a + run.size] = range(FIRST + run.b, FIRST + run.b + run.size)
    return [*found[: len(text)], FIRST - 1]


def _others(count: int, num_tokens: int) -> list[int]:
    """Tokens that no answer has and none of which follows another."""
    free = list(range(FIRST + num_tokens + 1, _VOCAB_SIZE, 2))
    random.Random(0).shuffle(free)
    return free[:count]


def is_answer(tokens: Sequence[int]) -> bool:
    """Whether a model of these gave them behind such a prompt."""
    return list(tokens) == list(range(FIRST, FIRST + len(tokens)))
