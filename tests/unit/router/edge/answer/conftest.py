"""The demo model's vocabulary."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer

from shared.model.text.tokenizer import Tokenizer
from tests.demo import DEMO


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=[tokenizer.eos_token_id])
