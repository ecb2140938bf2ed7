"""The engine on a GPU: captured decode steps, steps launched ahead, sampling on the device, the pool's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("numpy", reason="the engine's inputs are NumPy arrays")
pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

from shared.engine.plan import BlockCopy, PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner.draft import draft_layout, load_draft, open_draft
from shared.engine.runner.profile_run import measure_budget
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.engine.speculation.speculator import Speculator
from shared.errors import ConfigError
from shared.kernels.pool_view import dtype_name
from shared.kv.checksum import BlockChecksum
from shared.kv.layout import BlockLayout
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config, parse_config
from shared.model.random_weights import random_decoder
from tests.integration.engine.families import write_family
from tests.integration.engine.heads import write_knowing, write_knowing_eagle
from tests.integration.engine.test_static_decode import PROMPTS, run_all
from tests.unit.engine.speculation.drafters import HostileDrafter, KnowingDrafter

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_graphs_and_steps_ahead_give_the_tokens_of_the_eager_way(folder: Path, num_blocks: int) -> None:
    plain = RunnerConfig(max_num_seqs=5, static_decode=False)
    expected, _ = run_all(folder, device="cuda", config=plain, ahead=False)
    graphs = RunnerConfig(max_num_seqs=5, max_seq_len=128)
    pieces = RunnerConfig(max_num_seqs=5, max_seq_len=128, piecewise_tokens=20)
    for config, ahead in ((graphs, None), (graphs, False), (plain, True), (pieces, None)):
        found, _ = run_all(folder, device="cuda", num_blocks=num_blocks, config=config, ahead=ahead)
        for ours, theirs in zip(found, expected, strict=True):
            assert [t.token_id for t in ours] == [t.token_id for t in theirs]
            assert [t.logprob for t in ours] == pytest.approx([t.logprob for t in theirs], abs=1e-4)


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_guesses_of_steps_ahead_change_no_token(folder: Path, num_blocks: int) -> None:
    """Right ones, right ones but for each fifth, and by chance; in graphs and eagerly."""
    plain = RunnerConfig(max_num_seqs=5, static_decode=False)
    expected, _ = run_all(folder, device="cuda", config=plain, ahead=False)
    answers = [[token.token_id for token in tokens] for tokens in expected]
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    pieces = RunnerConfig(max_num_seqs=5, max_seq_len=128, piecewise_tokens=None)
    for config in (pieces, plain):
        for drafter in (
            KnowingDrafter(known),
            KnowingDrafter(known, lambda place, token: token + (place % 5 == 2)),
            HostileDrafter(),
        ):
            speculator = Speculator([drafter], num_guesses=7)
            found, _ = run_all(
                folder, device="cuda", num_blocks=num_blocks, config=config, ahead=None, speculator=speculator
            )
            assert [[token.token_id for token in tokens] for tokens in found] == answers
            assert sum(speculator.counters.num_guesses.values()) > 0


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_a_heads_guesses_change_no_token(tmp_path: Path, num_blocks: int) -> None:
    """One of the checkpoint, and an EAGLE-3 head; in graphs and eagerly, as many guesses as gain and always 4."""
    folder = write_knowing(tmp_path / "model", num_layers=4)
    eagle = write_knowing_eagle(tmp_path / "head", folder)
    plain = RunnerConfig(max_num_seqs=5, static_decode=False)
    pieces = RunnerConfig(max_num_seqs=5, max_seq_len=128, piecewise_tokens=None, most_guesses=4)
    expected, _ = run_all(folder, device="cuda", config=plain, ahead=False)
    for config in (pieces, plain):
        for head in ({"has_head": True}, {"head_folder": eagle}):
            for num_guesses in (4, None):
                options = {"config": config, "num_guesses": num_guesses, "num_blocks": num_blocks, **head}
                found, _ = run_all(folder, device="cuda", ahead=None, **options)
                assert [[t.token_id for t in ours] for ours in found] == [[t.token_id for t in e] for e in expected]


def test_a_drafts_guesses_change_no_token_and_those_of_the_model_itself_are_right(folder: Path) -> None:
    config = RunnerConfig(max_num_seqs=5, max_seq_len=128, piecewise_tokens=None)
    expected, _ = run_all(folder, device="cuda", config=config, ahead=None)
    for num_guesses in (5, None):
        decoder = load_draft(folder, torch.float32, load_config(folder).vocab_size, device="cuda")
        speculator = Speculator([], num_guesses, open_draft(decoder, draft_layout(decoder, BLOCK_SIZE), 64, 5))
        found, _ = run_all(folder, device="cuda", config=config, ahead=None, speculator=speculator)
        assert [[t.token_id for t in ours] for ours in found] == [[t.token_id for t in e] for e in expected]
        if num_guesses is not None:
            guessed, right = (sum(counts.values()) for counts in (
                speculator.counters.num_guesses, speculator.counters.num_accepted
            ))  # fmt: skip
            assert right > 0.8 * guessed > 0


def test_the_gpu_gives_the_tokens_of_the_cpu(folder: Path) -> None:
    found, _ = run_all(folder, device="cuda")
    expected, _ = run_all(folder)
    assert [[t.token_id for t in tokens] for tokens in found] == [[t.token_id for t in tokens] for tokens in expected]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Decoder, BlockLayout]:
    decoder = Decoder.load(folder, dtype, "cuda")
    config, name = decoder.config, dtype_name(dtype)
    return decoder, config.block_layout(BLOCK_SIZE, name)


def decode_plan(num_seqs: int, start: int, *, pending: bool, chunk: int = 1, **params: float) -> StepPlan:
    items = []
    for i in range(num_seqs):
        count = chunk if i == num_seqs - 1 else 1
        spec = SampleSpec(SamplingParams(**{"seed": i, "max_tokens": 99, **params}), start + count)  # type: ignore[arg-type]
        tokens = (0,) if pending else tuple(range(3, 3 + count))
        items.append(
            PlannedSequence(f"s{i}", tokens, start, (3 * i, 3 * i + 1, 3 * i + 2), 9, (spec,), i if pending else None)
        )
    return StepPlan(tuple(items))


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_launching_a_step_never_waits_for_the_device(folder: Path) -> None:
    decoder, layout = loaded(folder)
    with torch.inference_mode():
        runner = Runner(decoder, layout, 32, RunnerConfig(max_num_seqs=8, max_seq_len=48))
        runner.start()
        plans = [
            decode_plan(5, 20, pending=False, chunk=7, temperature=0.8, top_p=0.9),
            decode_plan(5, 27, pending=True, temperature=0.8, top_p=0.9, logprobs=2, min_tokens=3),
            decode_plan(5, 28, pending=True, temperature=0.0),
        ]
        last = plans[-1].sequences[0]._replace(token_ids=(3, 4, 5), pending=None)
        samples = tuple(last.samples[0]._replace(position=29 + place) for place in range(3))
        plans.append(StepPlan((last._replace(start=29, samples=samples),)))  # two guesses
        for plan in plans:
            runner.execute(plan)  # whatever compiles has compiled
        for plan in plans:
            with no_waiting():
                step = runner.launch(plan)
            assert len(step.result().sampled) == sum(len(item.samples) for item in plan.sequences)


def test_checksums_beside_a_running_step_are_those_of_the_host(folder: Path) -> None:
    decoder, layout = loaded(folder, torch.bfloat16)
    runner = Runner(decoder, layout, 9)
    runner.pool.rows.normal_()
    torch.cuda.synchronize()
    expected = BlockChecksum(layout.block_bytes // 8).checksum_blocks(runner.kv_blocks.cpu(), [8, 0, 3])
    assert runner.checksums([8, 0, 3]) == expected


def test_the_pool_takes_what_weights_and_the_largest_step_leave(folder: Path) -> None:
    decoder, layout = loaded(folder)
    graphs = RunnerConfig(8, 64, 256, piecewise_tokens=None)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_seq_len": 64}
    without = measure_budget(decoder, layout, **limits)
    budget = measure_budget(decoder, layout, **limits, graphs=graphs)
    assert 0 < without.step_bytes < budget.step_bytes < budget.free_bytes
    fitting = budget.num_blocks(layout)
    with pytest.raises(ConfigError, match=f"do not fit, {fitting} do"):
        budget.choose(fitting + 1, fitting, layout)
    with pytest.raises(ConfigError, match=r"KV blocks of [0-9]+ bytes do not fit"):
        Runner(decoder, layout, 2 * budget.free_bytes // layout.block_bytes)
    assert Runner(decoder, layout, min(fitting, 1000)).kv_blocks.is_cuda


def test_weights_drawn_on_the_device_make_a_model_of_finite_logits() -> None:
    config = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        }
    )
    decoder = random_decoder(config, torch.bfloat16, "cuda")
    assert decoder.kernels.name == "triton"
    layout = config.block_layout(BLOCK_SIZE, "bfloat16")
    with torch.inference_mode():
        runner = Runner(decoder, layout, 32, RunnerConfig(max_num_seqs=8))
        runner.start()
        sampled = runner.execute(decode_plan(5, 20, pending=False)).sampled
    assert len(sampled) == 5
    assert all(hasattr(token, "token_id") for token in sampled)


def test_swapped_blocks_are_sent_and_checked_behind_late_copies(folder: Path) -> None:
    decoder, layout = loaded(folder, torch.bfloat16)
    runner = Runner(decoder, layout, 9, RunnerConfig(num_host_blocks=1))
    runner.pool.rows.normal_()
    torch.cuda.synchronize()
    before = runner.kv_blocks.cpu()
    torch.cuda._sleep(2_000_000_000)  # about a second: the copies stay queued behind it
    runner.launch(StepPlan((), (BlockCopy(1, 0, to_host=True), BlockCopy(2, 0, to_host=False))))
    expected = BlockChecksum(layout.block_bytes // 8).checksum_blocks(before, [1])
    assert runner.checksums([2]) == expected
    torch.cuda._sleep(2_000_000_000)
    runner.launch(StepPlan((), (BlockCopy(3, 0, to_host=True), BlockCopy(4, 0, to_host=False))))
    assert bytes(runner.blocks.outgoing([4])[0]) == before[3].view(torch.uint8).numpy().tobytes()
