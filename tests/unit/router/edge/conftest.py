"""What the edge's tests share."""

from __future__ import annotations

import pytest

from shared.model.text.tokenizer import Tokenizer
from tests.unit.router.edge.scripted_core import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every byte a token, begin and end tokens beside them."""
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
