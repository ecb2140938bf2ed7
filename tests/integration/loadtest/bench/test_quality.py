"""`make eval` on the demo model: its figures beside transformers', and the most that each form may cost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from loadtest.bench.quality import measure as quality
from loadtest.bench.quality.judge import Quality
from loadtest.bench.quality.measure import default_forms, forms_of, judge
from loadtest.bench.quality.reader import Texts, texts_of
from shared.errors import ConfigError
from shared.model.text.tokenizer import Tokenizer
from tests.demo import DEMO
from tests.integration.engine.test_greedy_against_transformers import load_transformers

BOUNDS = {"int8": (0.005, 0.98), "int4": (0.03, 0.85), "fp8": (0.005, 0.95), "kv-bf16": (0.003, 0.99)}
"""Form → the most by which its perplexity may be higher, and the least share of tokens that both models find."""


@pytest.fixture(scope="module")
def texts() -> Texts:
    return texts_of(Tokenizer.load(DEMO), quality.TEXT.read_text(), num_tokens=2048, window=512, num_greedy=16)


@pytest.fixture(scope="module")
def rows(texts: Texts) -> dict[str, Quality]:
    forms = forms_of(default_forms(DEMO, torch.float32), torch.float32)
    return {row.name: row for row in judge(DEMO, DEMO, forms, texts, torch.float32)}


def test_the_plain_model_has_the_perplexity_and_answers_that_transformers_find(texts, rows):
    model = load_transformers(DEMO)
    loss = 0.0
    with torch.inference_mode():
        for window in texts.windows:
            logits = model(torch.tensor([window])).logits[0]
            loss += float(functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum"))
    plain = rows["stored"]
    assert plain.perplexity == pytest.approx(math.exp(loss / texts.num_predicted), rel=1e-4)
    assert (plain.change, plain.kl, plain.top1, plain.greedy) == (0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("form", BOUNDS)
def test_no_form_costs_more_than_its_bound(rows, form):
    most_change, least_top1 = BOUNDS[form]
    assert rows[form].change <= most_change
    assert rows[form].top1 >= least_top1
    assert rows[form].kl > 0


def test_activations_in_int8_cost_no_more_than_weights_may(texts):
    forms = forms_of(["int8", "w8a8", "int4", "w4a8"], torch.bfloat16)
    int8, w8a8, int4, w4a8 = judge(DEMO, DEMO, forms, texts, torch.bfloat16)
    assert w4a8.change <= BOUNDS["int4"][0]
    assert w4a8.kl < 1.2 * int4.kl
    assert w8a8.change <= 0.005
    assert w8a8.top1 >= 0.96
    assert w8a8.kl > int8.kl > 0


def test_fewer_bits_are_fewer_bytes_and_further_from_the_plain_model(rows):
    assert rows["stored"].weight_bytes > rows["int8"].weight_bytes > rows["int4"].weight_bytes
    assert rows["kv-bf16"].kl < rows["int8"].kl < rows["int4"].kl
    assert rows["int8"].top1 > rows["int4"].top1
    assert rows["kv-bf16"].greedy > rows["int4"].greedy > 0


def test_the_command_writes_each_form_for_scripts(tmp_path: Path):
    out = tmp_path / "eval.json"
    quality.main(forms="int8 int4+kv-bf16", tokens=200, window=64, greedy=4, out=out)
    written = json.loads(out.read_text())
    assert [row["name"] for row in written["results"]] == ["int8", "int4+kv-bf16"]
    assert all(row["perplexity"] > 1 for row in written["results"])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"forms": "int3"}, "forms"),
        ({"forms": "kv-fp64"}, "forms"),
        ({"dtype": "fp64"}, "dtype"),
        ({"text": Path("nowhere.txt")}, "text"),
        ({"window": 4}, "window"),
        ({"window": 100_000}, "window"),
        ({"greedy": 0}, "greedy"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(options, field):
    with pytest.raises(ConfigError) as refused:
        quality.main(**options)
    assert refused.value.details["field"] == field


def test_a_text_of_a_few_words_is_refused(tmp_path: Path):
    (tmp_path / "short.txt").write_text("In the beginning")
    with pytest.raises(ConfigError, match="too few"):
        quality.main(text=tmp_path / "short.txt")
