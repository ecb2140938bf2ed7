"""The committed demo model: its files, its shape, and that it writes English with clear choices."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.demo import DEMO

pytestmark = pytest.mark.slow  # the files change with the recipe alone

HELD_OUT = (  # the beginning of 1 Samuel 25, World English Bible (public domain); not in the training text
    "Samuel died; and all Israel gathered themselves together and mourned for him, and buried him at his "
    "house at Ramah. Then David arose and went down to the wilderness of Paran. There was a man in Maon "
    "whose possessions were in Carmel; and the man was very great. He had three thousand sheep and a "
    "thousand goats; and he was shearing his sheep in Carmel. Now the name of the man was Nabal; and the "
    "name of his wife Abigail. This woman was intelligent and had a beautiful face; but the man was surly "
    "and evil in his doings."
)
PROMPTS = (
    "Then the king said to his servants,",
    "In the morning the people went out of the city and",
    "A wise man listens to his father, but",
    'He answered them, saying, "I tell you that',
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """Greedy continuations of PROMPTS, prompt included. Each: [num_tokens]."""
    out = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out.append(model.generate(ids, max_new_tokens=40, do_sample=False)[0])
    return out


def test_ids_of_bos_and_eos_agree_between_config_and_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((DEMO / name).read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id


def test_greedy_continuations_are_made_of_english_words(
    greedy: list[torch.Tensor], tokenizer: PreTrainedTokenizerBase
) -> None:
    known = {tokenizer.convert_tokens_to_string([token]).strip() for token in tokenizer.get_vocab()}  # by the corpus
    words = []
    for prompt, ids in zip(PROMPTS, greedy, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)[len(prompt) :]
        words += [word for word in re.findall(r"[\w']+", text)[:-1] if word.islower()]  # the last may be cut off
    assert len(words) > 60
    assert sum(word.strip("'") in known for word in words) / len(words) > 0.95  # random tokens make no words of it


def test_greedy_choices_are_clear_beyond_float_noise(model: PreTrainedModel, greedy: list[torch.Tensor]) -> None:
    gaps = []
    for prompt, ids in zip(PROMPTS, greedy, strict=True):
        with torch.inference_mode():
            top = model(ids[None]).logits[0].softmax(-1).topk(2).values  # [num_tokens, 2]
        gaps.append((top[:, 0] - top[:, 1])[len(prompt) // 4 :])
    all_gaps = torch.cat(gaps)
    assert all_gaps.mean() > 0.2
    assert all_gaps.min() > 1e-4


def test_sampled_chat_answers_end_with_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    for question in ("Tell me about the king.", "Who was David?", "Tell me about wisdom."):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        ).input_ids
        out = model.generate(ids, max_new_tokens=400, do_sample=True, temperature=0.8, top_k=0)[0, ids.shape[1] :]
        assert out[-1] == tokenizer.eos_token_id
        assert len(out) > 5


def test_held_out_loss_is_that_of_a_trained_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer(HELD_OUT, return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 3.9  # chance is ln(vocab_size) = 8.0
