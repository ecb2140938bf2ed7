"""A cluster whose blocks are encrypted on their way: hand-offs, offers, fetches from peers and from store nodes."""

from __future__ import annotations

import pytest

from tests.e2e.running import BLOCK_SIZE
from tests.e2e.stage import HOST_BYTES, prompt, staged

pytestmark = pytest.mark.slow


async def _answers(folder, encryption: str) -> list[tuple[list[int], int]]:
    """Tokens, and the prompt's tokens that were fetched: computed, from a peer, from the store node."""
    spec = {"num_prefill": 2, "store_host_bytes": HOST_BYTES, "block_encryption": encryption}
    async with staged(folder, **spec) as stage:
        tokens = prompt(200)
        answers = [await stage.ask(tokens, "prefill-0")]
        await stage.held(tokens, 12, ["prefill-0"])
        stage.lookup.peers = frozenset({"prefill-0"})
        answers.append(await stage.ask(tokens, "prefill-1"))
        await stage.stored(tokens, 12)
        stage.lookup.peers = frozenset()
        other = prompt(200, seed=41)
        await stage.ask(other, "prefill-0")
        await stage.stored(other, 12)
        answers.append(await stage.ask(other, "prefill-1"))
        await stage.idle()
        assert [stage.load(link.name).num_bad_blocks for link in stage.fleet.links] == [0, 0, 0]
        assert await stage.num_bad() == 0
        assert stage.fleet.block_encryption == encryption
        return [(answer, summary.num_fetched_tokens) for answer, summary in answers]


async def test_the_tokens_are_those_of_a_cluster_without_encryption(tmp_path):
    plain = await _answers(tmp_path / "plain", "none")
    assert [fetched for _, fetched in plain] == [0, 12 * BLOCK_SIZE, 12 * BLOCK_SIZE]
    assert await _answers(tmp_path / "encrypted", "aes-gcm") == plain
