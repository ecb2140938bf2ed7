"""The recipe's parts: OSIS reading, chat data, rows, optimizer, and the network against transformers."""

from pathlib import Path

import pytest
import torch
from jinja2 import Environment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from models.recipe.chat import BOS, EOS, TEMPLATE, Message, render
from models.recipe.corpus import Chapter
from models.recipe.data import Rows, split, train_tokenizer
from models.recipe.export import as_shipped, write_config, write_weights
from models.recipe.network import Llama, Shape
from models.recipe.optim import Optimizer

pytestmark = pytest.mark.slow

CHAPTERS = [
    Chapter(
        f"Tale {n}",
        (
            f"There was a king in the city, and his name was Hiram, and he had {n} sons.",
            'Then Hiram said to his servants, "Bring me bread and water from the house."',
            "\nThey brought it to him; and he ate, and Hiram slept until the morning.",
        )
        * 8,
    )
    for n in range(60)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer((chapter.text for chapter in CHAPTERS), 320)


def test_render_is_what_the_chat_template_renders() -> None:
    messages = [Message("system", "Be brief."), Message("user", " Hello "), Message("assistant", "Yes.")]
    plain = [{"role": m.role, "content": m.content} for m in messages]
    template = Environment(autoescape=False).from_string(TEMPLATE)
    assert template.render(messages=plain, bos_token=BOS, eos_token=EOS) == render(messages)


def test_split_shares_no_chapter() -> None:
    parts = split(CHAPTERS)
    assert {c.title for c in parts.train}.isdisjoint(c.title for c in parts.held_out)
    assert len(parts.train) + len(parts.held_out) == len(CHAPTERS)
    assert len(parts.held_out) == 1


def test_network_matches_transformers_on_the_exported_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = Shape(vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2)
    network = Llama(shape)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    network = as_shipped(network)
    write_config(network, tmp_path, bos=0, eos=1)
    assert write_weights(network, tmp_path) == (tmp_path / "model.safetensors").stat().st_size
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 96, (2, 40))
    with torch.inference_mode():
        torch.testing.assert_close(network(ids), oracle(ids).logits, atol=2e-5, rtol=1e-4)


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    shape = Shape(vocab_size=320, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1)
    network = Llama(shape)
    optimizer = Optimizer(network, steps=30, warmup=5)
    losses = []
    for step, batch in zip(range(30), Rows(tokenizer, CHAPTERS, 0.2, seed=1).batches(4, 64), strict=False):
        loss = network.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(step)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
