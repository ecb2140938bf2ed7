"""The models with which engines' guesses are compared: their answer is known, and what a prompt has of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtest.bench.peers.adapter import DRAFT, NGRAM, VOCAB_SIZE, Settings
from loadtest.bench.peers.ours import Ours
from loadtest.bench.speculation.texts import CASES
from loadtest.rig.models import DEMO
from loadtest.rig.successors import FIRST, as_successors, is_answer, write_successors
from shared.model.checkpoints import write_random_checkpoint
from shared.model.text.tokenizer import Tokenizer

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a draft of which every fourth guess is wrong."""
    folder = tmp_path_factory.mktemp("successors")
    write_random_checkpoint(folder / "plain", vocab_size=VOCAB_SIZE, hidden_size=96, dtype=torch.bfloat16)
    for name, wrong in (("model", 0.0), ("draft", 0.25)):
        write_successors(folder / "plain", folder / name, wrong)
    return folder / "model", folder / "draft"


@pytest.mark.parametrize("guesses_by", ["", NGRAM, DRAFT])
@pytest.mark.parametrize("form", ["plain", "int4"])
def test_the_answer_is_known(folders, tokenizer, tmp_path, guesses_by, form) -> None:
    model, draft = folders
    engine = Ours(Settings(model, tmp_path, 1, form=form, guesses_by=guesses_by, draft=draft), 1)
    try:
        text = CASES["edit"](0)
        prompt = as_successors(tokenizer, text.prompt, text.answer, 60, NUM_TOKENS)
        seconds, tokens = engine.answer(prompt, NUM_TOKENS, 5)
        assert is_answer(tokens)
        assert len(tokens) == NUM_TOKENS
        assert seconds > 0
    finally:
        engine.close()


def test_a_prompt_has_of_the_answer_what_the_real_one_has(tokenizer) -> None:
    answer = set(range(FIRST, FIRST + NUM_TOKENS))
    shared = {}
    for kind in ("edit", "chat"):
        text = CASES[kind](0)
        prompt = as_successors(tokenizer, text.prompt, text.answer, 200, NUM_TOKENS)
        assert prompt[-1] == FIRST - 1
        assert len(set(prompt)) == len(prompt) <= 200
        shared[kind] = sum(token in answer for token in prompt)
    assert shared["edit"] > 0.75 * NUM_TOKENS
    assert shared["chat"] < 0.25 * NUM_TOKENS
