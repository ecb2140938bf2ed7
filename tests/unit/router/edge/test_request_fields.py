"""What a model recommends, when a request is due, and how several answers differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from services.router.dispatch.request import Request
from services.router.edge.http.endpoint import sub_requests
from services.router.edge.output_stream import OutputStream
from services.router.edge.scheduling import SchedulingHints, scheduling_hints
from services.router.edge.text.generation_defaults import NEUTRAL, NO_DEFAULTS, GenerationDefaults, recommended
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, ModelLoadError, Overloaded
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.seeds import derived_seed
from tests.demo import DEMO
from tests.unit.router.edge.scripted_core import ScriptedCore, Step, text_steps

VOCAB_SIZE = 1000


def test_only_sampling_is_taken_from_the_file(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path, VOCAB_SIZE) == NO_DEFAULTS
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "eos_token_id": 1, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert GenerationDefaults.load(tmp_path, VOCAB_SIZE).given == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_tokens_that_the_file_forbids_are_forbidden_and_an_end_of_answers_is_no_bad_word(tmp_path: Path) -> None:
    content = {"suppress_tokens": [3, 5, VOCAB_SIZE], "bad_words_ids": [[7, 8], [5], [2]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    defaults = GenerationDefaults.load(tmp_path, VOCAB_SIZE, eos_token_ids=(2,))
    assert defaults.given == {"bad_sequences": ((3,), (5,), (7, 8))}
    assert SamplingParams(**defaults.given).bad_sequences == ((3,), (5,), (7, 8))


def test_fields_that_are_not_served_are_named_once_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for model, content in (
        ("plain", {"do_sample": True, "num_beams": 1, "guidance_scale": None, "bos_token_id": 1, "max_length": 4096}),
        ("odd", {"no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "typical_p": 0.9, "min_new_tokens": 0}),
    ):
        folder = tmp_path / model
        folder.mkdir()
        (folder / "config.json").write_text((DEMO / "config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps(content))
        recommended(folder, load_config(DEMO))
    assert caplog.messages == [
        "odd/generation_config.json: answers do not follow no_repeat_ngram_size, forced_eos_token_id, typical_p"
    ]


def test_every_field_that_transformers_reads_is_served_named_or_without_effect_on_answers() -> None:
    """A field that a later release adds must be sorted in."""
    known = {name for name in GenerationConfig().to_diff_dict() | vars(GenerationConfig()) if not name.startswith("_")}
    without_effect = {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("max_length", "max_new_tokens", "num_return_sequences", "length_penalty", "early_stopping"),
        *("renormalize_logits", "remove_invalid_values", "compile_config", "disable_compile"),
        *("use_mtp", "continuous_batching_config", "speculation_type", "is_assistant", "max_matching_ngram_size"),
    }
    guesses = ("assistant_", "num_assistant_", "prompt_lookup_", "target_lookbehind")
    left = {name for name in known - without_effect if not name.startswith(guesses)}
    served = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "suppress_tokens", "bad_words_ids"}
    assert left - served <= set(NEUTRAL)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", "hot"), ("top_k", 1.5), ("top_p", 2), ("min_p", True)),
        *(("suppress_tokens", 5), ("suppress_tokens", [True]), ("bad_words_ids", [[VOCAB_SIZE]])),
        *(("suppress_tokens", list(range(769))), ("bad_words_ids", [3]), ("bad_words_ids", [[]])),
        *(("bad_words_ids", {"a": 1}), ("bad_words_ids", [[1, -1]])),
    ],
)
def test_a_wrong_value_stops_the_start_with_its_name(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelLoadError) as caught:
        GenerationDefaults.load(tmp_path, VOCAB_SIZE)
    assert caught.value.field == name


def test_all_of_them_and_none():
    assert scheduling_hints({}) == SchedulingHints("default", 0, "", 0.0)
    headers = {"x-tenant": "gold", "x-priority": "-3", "x-session-id": "s1", "x-ttft-timeout-ms": "1500"}
    headers |= {"x-cache-retention": "1h", "x-next-turn-ms": "2500"}
    assert scheduling_hints(headers) == SchedulingHints("gold", -3, "s1", 1.5, 3600.0, 2.5)
    assert scheduling_hints({"x-next-turn-ms": "0"}).next_turn_s == 0.0


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-tenant", "a b"),
        ("x-session-id", "s" * 129),
        ("x-priority", "high"),
        ("x-priority", "101"),
        ("x-ttft-timeout-ms", "0"),
        ("x-ttft-timeout-ms", "nan"),
        ("x-ttft-timeout-ms", "soon"),
        ("x-cache-retention", "2h"),
        ("x-next-turn-ms", "-1"),
        ("x-next-turn-ms", "nan"),
        ("x-next-turn-ms", "soon"),
        ("x-next-turn-ms", "86400001"),
    ],
)
def test_a_bad_one_is_named(header, value):
    with pytest.raises(InvalidRequest) as refused:
        scheduling_hints({header: value})
    assert refused.value.field == header


def prepared(seed: int = 7, request_id: str = "r") -> Request:
    return Request(request_id, (1,), SamplingParams(seed=seed))


def stream(tokenizer: Tokenizer, *answers: list[Step]) -> tuple[OutputStream, ScriptedCore]:
    """One choice for each script."""
    scripts = iter(answers)
    core = ScriptedCore(lambda request: next(scripts))
    return OutputStream(core, [prepared(request_id=f"r-{i}") for i in range(len(answers))], tokenizer), core


def test_one_answer_is_the_request_itself() -> None:
    request = prepared()
    assert sub_requests([request], 1) == [request]


def test_answers_have_their_own_ids_and_seeds_the_first_the_clients_seed() -> None:
    fanned = sub_requests([prepared(7), prepared(8)], 3)
    assert [request.request_id for request in fanned] == [f"r-{i}" for i in range(6)]
    seeds = [request.sampling.seed for request in fanned]
    assert (seeds[0], seeds[3]) == (7, 8)
    assert len(set(seeds)) == 6


def test_derived_seeds_are_fixed_forever() -> None:
    # A client that repeats its seed and n must get the same answers from every release.
    assert [derived_seed(7, i) for i in range(3)] == [7, 14818979533484651488, 4504606891059362275]
    assert all(0 <= derived_seed(2**64 - 1, i) < 2**64 for i in range(50))


async def test_what_came_before_a_failure_is_still_passed_on(tokenizer: Tokenizer) -> None:
    outputs, core = stream(tokenizer, text_steps(tokenizer, "ab")[:1], [Overloaded("full")])
    async with outputs:
        index, delta = await anext(outputs)
        assert (index, delta.text) == (0, "a")
        with pytest.raises(Overloaded):
            await anext(outputs)
        assert all(running.closed.is_set() for running in core.running)
