"""bf16 logits beside those of transformers: how far they lie from fp32's, ours and theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from tests.integration.engine.families import STATES, write_family

from .paged_run import load_oracle, oracle_logits, prompt_logits
from .test_decoder import FAMILIES, PROMPT

TOLERANCE = 0.1
"""Of the logits' standard deviation, for the token in the middle. A token whose experts are chosen otherwise than in
fp32, because two of them are about as good, lies further off, in transformers as here; so does what attends to it."""


@pytest.mark.parametrize("family", [*FAMILIES, *STATES])
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(tmp_path: Path, family: str) -> None:
    if family in STATES:
        write_family(tmp_path, family)
    else:
        write_random_checkpoint(tmp_path, **{**FAMILIES[family], "seed": 2})
    wide = oracle_logits(load_oracle(tmp_path), PROMPT)
    narrow = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    theirs = _error(oracle_logits(narrow.eval(), PROMPT), wide)
    decoder = Decoder.load(tmp_path, torch.bfloat16, "cpu")
    for chunk_len in (len(PROMPT), 7):
        ours = _error(prompt_logits(decoder, PROMPT, chunk_len), wide)
        assert ours < TOLERANCE, f"chunks of {chunk_len}"
        assert ours < 2 * theirs, f"chunks of {chunk_len}"


def _error(logits: Tensor, wide: Tensor) -> float:
    """Of the token in the middle."""
    return float(((logits.float() - wide).std(dim=-1) / wide.std()).median())
