"""A hand-off between groups of unequal degrees, over UCX and counted: a message a block, and the KV's own bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from shared.engine.messages import (
    AddSequence,
    JoinSequence,
    ReleaseBlocks,
    ReserveSequence,
    SequenceReserved,
    StepOutput,
)
from shared.engine.sequence import Goal
from shared.kv.block_memory import leaving
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.receive_handoff import HandoffReceiver, ReceivedHandoff
from shared.kv.handoff.shipment import Shipment
from shared.kv.pool import OutgoingBlock
from shared.kv.transfer import KVTransfer
from shared.kv.ucx import UcxTransfer
from shared.model.checkpoints import write_random_checkpoint
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun
from tests.integration.engine.group_run import GroupRun
from tests.unit.collectives.in_threads import needs_library
from tests.waiting import DEADLINE_S

pytestmark = needs_library

Kind = tuple[Degrees, bool]
"""How a group is split, and whether its ranks have pools of their own."""
ONE: Kind = (Degrees(), False)
SPLITS: tuple[Kind, ...] = (
    (Degrees(2), False),
    (Degrees(4), False),
    (Degrees(1, 2), False),
    (Degrees(2), True),
    (Degrees(2, 2), True),
)
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 32
PROMPT = [7 + (i * 37) % 190 for i in range(53)]
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)
MAX_TOKENS = 8
BUDGET = {"max_num_batched_tokens": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_random_checkpoint(
        path, "LlamaForCausalLM", vocab_size=211, num_layers=NUM_LAYERS, num_heads=8, num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM, hidden_size=64, intermediate_size=96,
    )  # fmt: skip
    return path


@pytest.fixture
def sides(folder: Path) -> Iterator[tuple[dict[Kind, EngineRun], dict[Kind, EngineRun]]]:
    """Engines of each kind that compute the prompt in one step, for prefill and for decode."""
    with ExitStack() as stack:

        def engines() -> dict[Kind, EngineRun]:
            found: dict[Kind, EngineRun] = {ONE: stack.enter_context(closing(EngineRun(folder, **BUDGET)))}
            for degrees, own_pools in SPLITS:
                run = GroupRun(folder, degrees, own_pools=own_pools, **BUDGET)
                found[degrees, own_pools] = stack.enter_context(closing(run))
            return found

        yield engines(), engines()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[KVTransfer, KVTransfer]]:
    """Who sends, and who receives."""
    sender, receiver = UcxTransfer(), UcxTransfer()
    await sender.start()
    await receiver.start()
    yield sender, receiver
    await sender.close()
    await receiver.close()


async def hand_off(prefill: EngineRun, decode: EngineRun, sender: KVTransfer, receiver: KVTransfer) -> list[int]:
    """The prompt over both engines, as their workers hand it over; returns the output tokens."""
    receiving = decode.sequence(PROMPT, MAX_TOKENS)
    decode.engine.submit(ReserveSequence(receiving))
    reserved = await asyncio.to_thread(decode.next, SequenceReserved)
    memory = decode.engine.blocks.incoming([block_id for _, block_id in reserved.needed])
    buffers = {index: buffer for (index, _), buffer in zip(reserved.needed, memory, strict=True)}
    arriving = HandoffReceiver(receiver, ArrivalCheck(decode.layout.block_bytes), buffers, len(PROMPT))
    ticket, needed = arriving.open()

    def release(blocks: Sequence[OutgoingBlock]) -> None:
        prefill.engine.submit(ReleaseBlocks(tuple(block.block_id for block in blocks)))

    outgoing = partial(leaving, prefill.engine.blocks)
    shipment = Shipment(sender, receiver.address, ticket, len(needed), outgoing, release, DEADLINE_S)
    prefill.engine.submit(AddSequence(prefill.sequence(PROMPT, MAX_TOKENS, Goal.FIRST_TOKEN, frozenset(needed))))
    taking = asyncio.create_task(arriving.receive(DEADLINE_S))
    first = None
    while first is None:
        stepped = await asyncio.to_thread(prefill.next, StepOutput)
        shipment.add_noted(stepped.blocks)
        for token in stepped.tokens:
            first = token.token.token_id
    await shipment.finish(first, len(PROMPT), finished=False)
    assert await taking == ReceivedHandoff(first, finished=False)
    decode.engine.blocks.store([(block_id, buffers[index]) for index, block_id in reserved.needed])
    decode.engine.submit(JoinSequence(receiving.sequence_id, first, arriving.checksums))
    return [first, *(await asyncio.to_thread(decode.collect, [receiving.sequence_id]))[0]]


def sums(sender: KVTransfer, receiver: KVTransfer) -> list[int]:
    sent, received = sender.counters, receiver.counters
    of_blocks = [sent.blocks_sent, sent.bytes_sent, received.blocks_received, received.bytes_received]
    return [*of_blocks, sent.notes_sent, sent.note_bytes_sent]


@pytest.mark.slow
async def test_messages_and_bytes_of_a_hand_off_do_not_depend_on_the_degrees(
    sides: tuple[dict[Kind, EngineRun], dict[Kind, EngineRun]], ends: tuple[KVTransfer, KVTransfer]
) -> None:
    prefills, decodes = sides
    expected = decodes[ONE].generate(PROMPT, max_tokens=MAX_TOKENS)[0]
    counted: dict[tuple[Kind, Kind], list[int]] = {}
    for pair in product(prefills, decodes):
        prefill, decode = prefills[pair[0]], decodes[pair[1]]
        prefill.pool.clear_cache()
        decode.pool.clear_cache()
        before = sums(*ends)
        assert await hand_off(prefill, decode, *ends) == expected, pair
        counted[pair] = [new - old for new, old in zip(sums(*ends), before, strict=True)]
    kv_bytes = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4 * NUM_BLOCKS * BLOCK_SIZE  # keys and values in fp32
    *of_blocks, num_notes, note_bytes = counted[ONE, ONE]
    assert of_blocks == [NUM_BLOCKS, kv_bytes] * 2
    assert num_notes == 2, "a note for the blocks of the one step, and the trailer"
    assert note_bytes < 1000
    assert all(found == counted[ONE, ONE] for found in counted.values()), counted
