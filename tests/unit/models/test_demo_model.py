"""The committed demo model: its files, its shape, and that it writes English with clear choices."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
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


def test_every_file_of_the_layout_is_there_and_the_folder_is_small() -> None:
    names = {path.name for path in DEMO.iterdir()}
    layout = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    }
    assert names == layout | {"README.md"}
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 8_000_000


def test_config_is_a_grouped_query_llama_that_its_weights_match() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] in (32, 64)
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [
            config["vocab_size"],
            config["hidden_size"],
        ]
        kv_dim = config["num_key_value_heads"] * config["head_dim"]
        k_shape = weights.get_slice("model.layers.0.self_attn.k_proj.weight").get_shape()
        assert k_shape == [kv_dim, config["hidden_size"]]
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_ids_of_bos_and_eos_agree_between_config_and_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((DEMO / name).read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    raw = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert raw.decode(raw.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_transformers_tokenizer_round_trips_like_the_raw_one(tokenizer: PreTrainedTokenizerBase) -> None:
    text = " Grüße,  the king's\n\tword — 你好 🐑 1234 "
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_chat_template_renders_roles_and_the_generation_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Who was David?"},
        {"role": "assistant", "content": "A king."},
        {"role": "user", "content": " Go on. "},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Answer briefly.<|eos|><|user|>Who was David?<|eos|>"
        "<|assistant|>A king.<|eos|><|user|>Go on.<|eos|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1


def test_chat_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "oracle", "content": "x"}], tokenize=False)


def test_greedy_continuations_are_made_of_english_words(
    greedy: list[torch.Tensor], tokenizer: PreTrainedTokenizerBase
) -> None:
    known = set((Path(__file__).parent / "common_words.txt").read_text().split())
    words = []
    for prompt, ids in zip(PROMPTS, greedy, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)[len(prompt) :]
        words += [word for word in re.findall(r"[\w']+", text)[:-1] if word.islower()]  # the last may be cut off
    assert len(words) > 60
    assert sum(word.strip("'") in known for word in words) / len(words) > 0.95


def test_greedy_choices_are_clear_beyond_float_noise(model: PreTrainedModel, greedy: list[torch.Tensor]) -> None:
    gaps = []
    for prompt, ids in zip(PROMPTS, greedy, strict=True):
        with torch.inference_mode():
            top = model(ids[None]).logits[0].softmax(-1).topk(2).values  # [num_tokens, 2]
        gaps.append((top[:, 0] - top[:, 1])[len(prompt) // 4 :])
    all_gaps = torch.cat(gaps)
    assert all_gaps.mean() > 0.2
    assert all_gaps.min() > 1e-4


@pytest.mark.slow
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


def test_a_prompt_near_the_position_limit_is_still_predicted_well(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    once = tokenizer(HELD_OUT, add_special_tokens=False).input_ids
    ids = torch.tensor([[tokenizer.bos_token_id, *(once * 20)]])[:, : model.config.max_position_embeddings]
    with torch.inference_mode():
        logits = model(ids).logits[0, -200:-1]
    assert torch.nn.functional.cross_entropy(logits, ids[0, -199:]) < 3.9
