"""The trace's prefixes survive the way to tokens."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest

import loadtest
from loadtest.bench.prefix.prompts import BLOCK_SIZE, read_prompts
from loadtest.workloads.tokens import TokenSource
from shared.errors import ConfigError

SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
SOURCE = TokenSource(0, 3000)


def shared_head(one, other) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_equal_blocks_are_those_with_equal_ids_in_the_trace():
    lines = [json.loads(line) for line in SLICE.read_text().splitlines()[:60]]
    prompts = read_prompts(SLICE, 60, 1, SOURCE)
    assert len(prompts) == 60
    for i, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        assert len(prompt.token_ids) == -(-line["input_length"] // 32)
        assert prompt.num_output_tokens == line["output_length"]
        assert len(prompt.hashes) == len(prompt.token_ids) // BLOCK_SIZE
        for j in range(i):
            expected = shared_head(line["hash_ids"][: len(prompt.hashes)], lines[j]["hash_ids"])
            assert shared_head(prompt.hashes, prompts[j].hashes) == min(expected, len(prompts[j].hashes))


def test_a_vocabulary_that_cannot_tell_blocks_apart_is_refused():
    with pytest.raises(ConfigError, match="cannot keep"):
        read_prompts(SLICE, 10, 1, TokenSource(0, 105))
