"""Steps in pieces: they add up to the eager step, padding changes nothing, and graphs are replayed in their order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.plan import PlannedSequence, SampleSpec
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.eager_steps import EagerInputs, StepInputs
from shared.engine.runner.piecewise import PiecewiseSteps
from shared.engine.sampling_params import SamplingParams
from shared.kernels.pool_view import PoolView
from shared.model.decoder import Decoder
from tests.integration.engine.families import write_family

BLOCK_SIZE, NUM_BLOCKS, MOST = 16, 12, 40
SPEC = SampleSpec(SamplingParams(temperature=0.0, seed=0, max_tokens=1), 1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = write_family(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    return Decoder.load(folder, torch.float32, "cpu", kernels="torch")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def pool_of(decoder: Decoder) -> PoolView:
    """Of unlike numbers, with the block of padding."""
    layout = decoder.config.block_layout(BLOCK_SIZE, "float32")
    pool = PoolView.of(torch.zeros(layout.shape(NUM_BLOCKS + 1), dtype=torch.uint8), layout)
    pool.rows.normal_(generator=torch.Generator().manual_seed(5))
    return pool


def step_of(lens: list[tuple[int, int]]) -> StepInputs:
    """Sequences of (tokens computed before, tokens now), each in blocks of its own; all but the second sample."""
    items, block = [], 0
    for index, (start, count) in enumerate(lens):
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        tokens = tuple((7 * index + 3 * i) % 200 for i in range(count))
        blocks = tuple(range(block, block + num_blocks))
        items.append(PlannedSequence(f"{index}", tokens, start, blocks, start + count, () if index == 1 else (SPEC,)))
        block += num_blocks
    return EagerInputs(BLOCK_SIZE, DeviceLink(torch.device("cpu")), needs_lengths=False).of(items)


def eager(decoder: Decoder, inputs: StepInputs, pool: PoolView) -> Tensor:
    return decoder.forward(inputs.token_ids, inputs.positions, pool, inputs.batch, inputs.logit_rows)


MIXED = [(20, 1), (0, 9), (3, 11), (30, 1)]
PROMPT = [(0, 32)]


@pytest.mark.parametrize("lens", [MIXED, PROMPT, [(5, 1)], [(0, 3), (9, 2)]])
def test_pieces_give_the_eager_step_and_touch_no_other_block(decoder: Decoder, lens: list[tuple[int, int]]) -> None:
    inputs, expected_pool, pool = step_of(lens), pool_of(decoder), pool_of(decoder)
    expected = eager(decoder, inputs, expected_pool)
    steps = PiecewiseSteps(decoder, pool, MOST, None)
    steps.start()
    torch.testing.assert_close(steps.run(inputs)[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool.rows[:NUM_BLOCKS], expected_pool.rows[:NUM_BLOCKS], rtol=1e-5, atol=1e-5)


def test_pieces_without_padding_give_the_eager_step_to_the_bit(decoder: Decoder) -> None:
    inputs, expected_pool, pool = step_of(PROMPT), pool_of(decoder), pool_of(decoder)
    steps = PiecewiseSteps(decoder, pool, MOST, None)
    steps.start()
    assert torch.equal(steps.run(inputs)[0], eager(decoder, inputs, expected_pool))
    assert torch.equal(pool.rows[:NUM_BLOCKS], expected_pool.rows[:NUM_BLOCKS])


def test_what_lies_in_rows_of_padding_changes_no_bit(decoder: Decoder) -> None:
    found = []
    for before in (None, [(0, 24)]):
        pool = pool_of(decoder)
        steps = PiecewiseSteps(decoder, pool, MOST, None)
        steps.start()
        if before:
            steps.run(step_of(before))
            pool.memory.copy_(pool_of(decoder).memory)
            steps._attended.fill_(float("nan"))
        found.append((steps.run(step_of(MIXED))[0], pool.rows[:NUM_BLOCKS].clone()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class FakeGraph:
    """A call with the tensors of its capture: a replay computes anew, into the same memory."""

    def __init__(self, run: Callable[[], Tensor], output: Tensor, number: int, replayed: list[int]) -> None:
        self._run, self._output, self._number, self._replayed = run, output, number, replayed

    def replay(self) -> None:
        self._replayed.append(self._number)
        self._output.copy_(self._run())


class FakeGraphs:
    """Captures of `sizes` rows fail."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.num_rows: list[int] = []
        self.replayed: list[int] = []

    def capture(self, run: Callable[[], Tensor]) -> tuple[FakeGraph, Tensor]:
        output = run().clone()
        if output.shape[0] in self.failing:
            raise torch.OutOfMemoryError(f"no memory for {output.shape[0]} rows")
        self.num_rows.append(output.shape[0])
        return FakeGraph(run, output, len(self.num_rows) - 1, self.replayed), output


def captured(decoder: Decoder, pool: PoolView, graphs: Any) -> PiecewiseSteps:
    steps = PiecewiseSteps(decoder, pool, MOST, graphs)
    steps.start()
    return steps


def test_the_largest_are_captured_first_and_replayed_layer_by_layer(decoder: Decoder) -> None:
    graphs, pool, expected_pool = FakeGraphs(), pool_of(decoder), pool_of(decoder)
    steps, layers = captured(decoder, pool, graphs), decoder.config.num_layers
    assert layers > 1
    assert graphs.num_rows == [size for size in (40, 32, 24, 16, 8) for _ in range(layers)]
    for lens, rung in ((MIXED, 2), (PROMPT, 1), ([(5, 1)], 4), (MIXED, 2)):
        graphs.replayed.clear()
        logits, _ = steps.run(step_of(lens))
        assert graphs.replayed == [rung * layers + layer for layer in range(layers)]
        torch.testing.assert_close(logits, eager(decoder, step_of(lens), expected_pool), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pool.rows[:NUM_BLOCKS], expected_pool.rows[:NUM_BLOCKS], rtol=1e-5, atol=1e-5)


def test_buffers_never_move(decoder: Decoder) -> None:
    steps = captured(decoder, pool_of(decoder), FakeGraphs())
    tensors = {name: value for name, value in vars(steps).items() if isinstance(value, Tensor)}
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for lens in (MIXED, PROMPT):
        steps.run(step_of(lens))
    assert {name: getattr(steps, name).data_ptr() for name in tensors} == before
    assert {"_token_ids", "_positions", "_slots", "_query", "_attended"} <= set(before)


def test_a_size_that_cannot_be_captured_is_left_out_and_named(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    steps = captured(decoder, pool_of(decoder), FakeGraphs(40, 24))
    (record,) = caplog.records
    assert record.message == "pieces of 24, 40 tokens cannot be captured and are not used: no memory for 40 rows"
    assert [steps.takes(size) for size in (0, 1, 24, 32, 33)] == [False, True, True, True, False]
    logits, _ = steps.run(step_of(MIXED))  # of 22 tokens, in the pieces of 32
    torch.testing.assert_close(logits, eager(decoder, step_of(MIXED), pool_of(decoder)), rtol=1e-5, atol=1e-5)


def test_nothing_is_taken_where_nothing_could_be_captured_or_before_the_start(decoder: Decoder) -> None:
    assert not captured(decoder, pool_of(decoder), FakeGraphs(8, 16, 24, 32, 40)).takes(8)
    assert not PiecewiseSteps(decoder, pool_of(decoder), MOST, None).takes(8)


def test_steps_too_long_are_said_once(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    steps = captured(decoder, pool_of(decoder), FakeGraphs())
    assert [steps.takes(size) for size in (41, 500, 40)] == [False, False, True]
    assert [record.message for record in caplog.records] == [
        "steps of more than 40 tokens, such as one of 41, run eagerly"
    ]
