"""A fingerprint of the bits that a worker computes: in deterministic mode all workers of a model must share it."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView
from shared.kv.layout import BlockLayout
from shared.model.decoder import Decoder

NUM_TOKENS = 160
"""Tokens of the probe: longer than a tile of keys, so that attention over several is part of it."""
NUM_MATES = 2
"""Other sequences of the batch, where the probe is cut into chunks."""


def arithmetic_digest(decoder: Decoder, layout: BlockLayout) -> str:
    """8 hexadecimal digits over the logits of a fixed prompt; workers that compute alike have the same.

    The prompt is computed twice: whole, and cut into chunks and single tokens beside other sequences. Blocking; it
    takes about as long as a prompt of 500 tokens.

    Raises:
        ConfigError: the two differ, so these kernels are not deterministic on this machine.
    """
    length = min(NUM_TOKENS, decoder.config.max_position_embeddings)
    cuts = sorted({0, 1, length // 2, length // 2 + 1, length - 2, length - 1, length} - {-1})
    with torch.inference_mode():
        whole = _logits(decoder, layout, [0, length], 0)
        cut = _logits(decoder, layout, cuts, NUM_MATES)
    if not whole.nan_to_num().equal(cut.nan_to_num()):  # NaN is for the self-test to name
        raise ConfigError(
            f"deterministic: kernels {decoder.kernels.name} compute a prompt differently whole and in parts on this "
            "machine",
            field="deterministic",
        )
    return blake2b(whole.cpu().numpy().tobytes(), digest_size=4).hexdigest()


def _logits(decoder: Decoder, layout: BlockLayout, cuts: list[int], mates: int) -> Tensor:
    """[length, vocab_size] fp32: of the prompt's tokens, computed in steps that end at `cuts`."""
    length = cuts[-1]
    width, device = -(-length // layout.block_size), decoder.device
    memory = torch.zeros(layout.shape((mates + 1) * width), dtype=torch.uint8, device=device)
    pool = PoolView.of(memory, layout)
    tables = [list(range(seq * width, (seq + 1) * width)) for seq in range(mates + 1)]
    found = []
    for begin, end in pairwise(cuts):
        query_lens, kv_lens = [end - begin] * (mates + 1), [end] * (mates + 1)
        batch = AttentionBatch.from_lists(query_lens, kv_lens, tables, layout.block_size, device)
        places = torch.arange(begin, end, device=device)
        token_ids = torch.cat(
            [(1 + 37 * places + seq * places**2) % decoder.config.vocab_size for seq in range(mates + 1)]
        )
        lengths = torch.full_like(token_ids, length) if decoder.rotary.needs_lengths else None
        rows = torch.arange(end - begin, device=device)
        found.append(decoder.forward(token_ids, places.repeat(mates + 1), pool, batch, rows, lengths))
    return torch.cat(found)
