"""The demo model's vocabulary."""

from __future__ import annotations

import pytest

from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from tests.demo import DEMO


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="session")
def eos_token_ids() -> tuple[int, ...]:
    return load_config(DEMO).eos_token_ids


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> StructureCompiler:
    return StructureCompiler(lambda: tokenizer, eos_token_ids, vocab_size=tokenizer.vocab_size + 70)
