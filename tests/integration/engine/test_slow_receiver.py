"""A prefill engine with two receivers, of which one takes nothing: the other's prompts go on, the pool has room."""

from __future__ import annotations

import asyncio

from shared.engine.messages import AddSequence, ReleaseBlocks, StepOutput
from shared.engine.sequence import Goal
from shared.kv.handoff.receive_handoff import receive_trailer
from shared.kv.handoff.shipment import Shipment, trailer_bytes
from shared.kv.local import LocalPlane, LocalTransfer
from tests.integration.engine.engine_run import EngineRun
from tests.integration.engine.families import write_family
from tests.waiting import DEADLINE_S

NUM_BLOCKS = 40
NUM_PROMPTS = 12
"""A receiver; each of PROMPT_BLOCKS blocks, so that the prompts of one would overfill the pool."""
PROMPT_BLOCKS = 4
SHARE = 0.25


class HandOffs:
    """Prompts for two receivers through one prefill engine."""

    def __init__(self, run: EngineRun, sender: LocalTransfer) -> None:
        self.run = run
        self.sender = sender
        self.shipments: dict[str, Shipment] = {}
        self.endings: dict[str, asyncio.Task[None]] = {}
        self.unsent: dict[bytes, int] = {}

    def submit(self, ticket: int, receiver: bytes) -> str:
        prompt = [3 + (ticket * 7 + i * 5) % 200 for i in range(PROMPT_BLOCKS * 16)]
        item = self.run.sequence(prompt, 1, Goal.FIRST_TOKEN, frozenset(range(PROMPT_BLOCKS)))
        item.receiver = receiver
        self.shipments[item.sequence_id] = Shipment(
            self.sender, receiver, ticket, PROMPT_BLOCKS, self.run.engine.blocks.outgoing, self.release, DEADLINE_S
        )
        self.run.engine.submit(AddSequence(item))
        return item.sequence_id

    def release(self, block) -> None:
        self.unsent[block.receiver] -= 1
        self.run.engine.submit(ReleaseBlocks((block.block_id,), block.receiver))

    async def until_first_tokens(self, names: set[str]) -> None:
        """Serves the engine's events until all of these have theirs."""
        while names - self.endings.keys():
            event = await asyncio.to_thread(self.run.next, StepOutput)
            for block in event.blocks:
                self.unsent[block.receiver] = self.unsent.get(block.receiver, 0) + 1
                self.shipments[block.sequence_id].add(block)
            for token in event.tokens:
                ending = self.shipments[token.sequence_id].finish(token.token.token_id, 64, finished=False)
                self.endings[token.sequence_id] = asyncio.create_task(ending)


def whole(trailer) -> bool:
    return not trailer.aborted and sorted(trailer.block_indexes) == list(range(PROMPT_BLOCKS))


async def test_a_receiver_that_takes_nothing_holds_up_its_own_prompts_alone(tmp_path):
    folder = write_family(tmp_path / "model", "LlamaForCausalLM")
    run = EngineRun(folder, num_blocks=NUM_BLOCKS, max_num_batched_tokens=64, max_unsent_share=SHARE)
    plane = LocalPlane()
    sender, fast, slow = (LocalTransfer(plane) for _ in range(3))
    for transfer in (sender, fast, slow):
        await transfer.start()
    hand_offs = HandOffs(run, sender)

    def taking(transfer: LocalTransfer, ticket: int) -> asyncio.Task:
        size = run.layout.block_bytes
        buffers = [(index, memoryview(bytearray(size))) for index in range(PROMPT_BLOCKS)]
        incoming = transfer.expect(ticket, buffers, trailer_bytes(PROMPT_BLOCKS))
        return asyncio.create_task(receive_trailer(transfer, ticket, incoming, DEADLINE_S))

    try:
        arrivals, fast_names, slow_names = [], set(), set()
        for i in range(NUM_PROMPTS):
            slow_names.add(hand_offs.submit(2 * i, slow.address))
            fast_names.add(hand_offs.submit(2 * i + 1, fast.address))
            arrivals.append(taking(fast, 2 * i + 1))
        await hand_offs.until_first_tokens(fast_names)
        assert all(whole(trailer) for trailer in await asyncio.gather(*arrivals))
        # It goes beyond its share by the prompts that were under way then, and no further.
        assert SHARE * NUM_BLOCKS < hand_offs.unsent[slow.address] <= SHARE * NUM_BLOCKS + 2 * PROMPT_BLOCKS
        assert run.scheduler.num_waiting > 0
        late = [taking(slow, 2 * i) for i in range(NUM_PROMPTS)]
        await hand_offs.until_first_tokens(slow_names)
        assert all(whole(trailer) for trailer in await asyncio.gather(*late))
        await asyncio.gather(*hand_offs.endings.values())
    finally:
        run.close()
        for transfer in (sender, fast, slow):
            await transfer.close()
    assert not any(hand_offs.unsent.values())
