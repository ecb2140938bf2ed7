"""GGUF files: what their metadata become, and that bad ones are refused by name."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config, parse_config
from shared.model.gguf.description import config_of
from shared.model.gguf.folder import gguf_folder
from shared.model.gguf.header import GgufHeader, GgufTensor, read_gguf
from shared.model.gguf.vocabulary import tokenizer_of
from shared.model.text.tokenizer import Tokenizer
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import fingerprint
from shared.model.weights.plan import AS_STORED, QUANTIZATIONS, WeightPlan
from tandem_cli.up import find_model
from tests.demo import DEMO
from tests.gguf_files import write_model


def vocabulary(**changes: Any) -> dict[str, Any]:
    """The demo model's."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    special = {item["content"] for item in content["added_tokens"]}
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return {**fields, **changes}


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    *"\u2581aetn\u00fc",
    "\u2581t",
    "at",
    "an",
    "\u2581a",
    "en",
    "\u2581tan",
    "tat",
    "ten",
    "\u2581\u2581",
    "\u00fcn",
    "atat",
    "ata",
]
"""Pieces of a vocabulary that was made by SentencePiece, of which a longer one may be learned before its parts."""


def of_sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**fields, **changes}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "source"
    write_random_checkpoint(folder, hidden_size=32, intermediate_size=32, num_heads=2, head_dim=16, num_layers=1)
    return folder


def write(source: Path, to: Path, **metadata: Any) -> Path:
    write_model(source, ("Q8_0",), to / "small.gguf", to / "opened", **metadata)
    return to / "small.gguf"


def test_the_vocabulary_gives_the_tokens_of_the_tokenizer_that_it_was_made_of(tmp_path, source, monkeypatch):
    path = write(source, tmp_path, **vocabulary())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder, name = find_model(str(path))
    assert name == "small"
    ours, expected = Tokenizer.load(folder), Tokenizer.load(DEMO)
    for text in (
        "And God said, Let there be light: and there was light.",
        "  Zür\n\nich? <|user|>no",
        "it's \U0001f600",
    ):
        assert ours.encode(text) == expected.encode(text)
        assert ours.decode(ours.encode(text)) == expected.decode(expected.encode(text))
    config = load_config(folder)
    assert (config.hidden_size, config.num_heads, config.eos_token_ids) == (32, 2, (1,))
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("split", "begins"), [("llama-bpe", True), ("tekken", True), ("glm4", False), ("qwen2", False), ("gpt-2", False)]
)
def test_a_prompt_begins_as_the_vocabulary_says_where_the_file_does_not(tmp_path, source, split, begins):
    words = vocabulary(**{"tokenizer.ggml.pre": split})
    del words["tokenizer.ggml.add_bos_token"]
    tokenizer = Tokenizer.load(gguf_folder(write(source, tmp_path, **words), tmp_path / "cache"))
    assert (tokenizer.encode("And God said")[0] == 0) is begins
    assert 0 not in tokenizer.encode("And God said", add_special_tokens=False)


@pytest.mark.parametrize(
    ("added", "ends"),
    [
        (["<end_of_turn>", "<mask>"], [1, 3]),
        (["<|eot_id|>", "<|eom_id|>"], [1, 3, 4]),
        (["<|end|>", "<|endoftext|>"], [1, 3, 4]),
        (["<|end|>", "<|return|>", "<|call|>"], [1, 4, 5]),
    ],
)
def test_answers_end_at_marks_of_turns_that_the_file_does_not_name(added, ends):
    tokens = ["<unk>", "<eos>", "<|im_end|>", *added]  # the third is text
    words = {"tokens": tokens, "token_type": [2, 3, 1] + [3] * len(added), "eos_token_id": 1}
    header = header_of("gemma3", 1, **WINDOW)
    header.metadata.update({f"tokenizer.ggml.{name}": value for name, value in words.items()})
    assert config_of(header)["eos_token_id"] == ends


def test_fingerprints_follow_the_file(tmp_path, source):
    found = set()
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / place).mkdir()
        path = write(source, tmp_path / place, **vocabulary(**{"general.name": f"model {seed}"}))
        found.add(fingerprint(gguf_folder(path, tmp_path / "cache"), "float32"))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"general.architecture": "mamba"}, "general.architecture"),
        ({"llama.block_count": "many"}, "llama.block_count"),
        ({"llama.block_count": -1}, "llama.block_count"),
        ({"llama.block_count": 1 << 30}, "llama.block_count"),
        ({"llama.logit_scale": 8.0}, "llama.logit_scale"),
        ({"llama.attention.head_count_kv": [1, 2]}, "llama.attention.head_count_kv"),
        ({"llama.expert_count": 8}, "llama.expert_used_count"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
            "llama.rope.scaling.original_context_length",
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.attn_factor": 2.0},
            "llama.rope.scaling.attn_factor",
        ),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
        (of_sentencepiece(**{"tokenizer.ggml.scores": [0.5]}), "tokenizer.ggml.scores"),
        (of_sentencepiece(**{"tokenizer.ggml.precompiled_charsmap": [1]}), "tokenizer.ggml.precompiled_charsmap"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.merges": ["a b", "ab"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.bos_token_id": 1 << 30}, "tokenizer.ggml.bos_token_id"),
    ],
)
def test_what_is_not_served_is_refused_by_field(tmp_path, source, metadata, field):
    path = write(source, tmp_path, **vocabulary(**metadata))
    with pytest.raises(ModelLoadError) as caught:
        gguf_folder(path, tmp_path / "cache")
    assert caught.value.field == field


def header_of(architecture: str, num_layers: int, **own: Any) -> GgufHeader:
    """Of a file with one tensor a layer beside its embedding."""
    shared = {
        "block_count": num_layers, "context_length": 512, "embedding_length": 96, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    metadata = {f"{architecture}.{name}": value for name, value in {**shared, **own}.items()}
    names = ["token_embd.weight", *(f"blk.{layer}.attn_norm.weight" for layer in range(num_layers))]
    tensors = tuple(GgufTensor(name, "F32", (64, 96), 0, 0) for name in names)
    return GgufHeader(Path("small.gguf"), b"", 0, {"general.architecture": architecture, **metadata}, tensors)


WINDOW = {"attention.sliding_window": 8}


def test_a_gemma_file_that_names_no_windows_has_the_usual_ones_and_the_largest_scales_scores_by_hidden_numbers():
    for count, expected in ((26, 16), (62, 24)):
        config = config_of(header_of("gemma3", count, **WINDOW))
        assert config["query_pre_attn_scalar"] == expected
        assert config["layer_types"] == [
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(count)
        ]
        assert parse_config(config).layers[5].window is None
    assert set(config_of(header_of("gemma3", 6))["layer_types"]) == {"full_attention"}
    every_third = config_of(header_of("gemma3", 6, **WINDOW, **{"attention.sliding_window_pattern": 3}))
    assert every_third["layer_types"].index("full_attention") == 2


def test_what_files_leave_out_has_the_values_that_llama_cpp_gives_it():
    gemma2 = config_of(header_of("gemma2", 46))
    assert (gemma2["sliding_window"], gemma2["query_pre_attn_scalar"]) == (4096, 24)
    assert gemma2["layer_types"] == ["sliding_attention", "full_attention"] * 23
    parsed = parse_config(gemma2)
    assert (parsed.softcap, parsed.logit_softcap) == (50.0, 30.0)
    assert config_of(header_of("phi3", 2, **{"attention.sliding_window": 0}))["sliding_window"] is None
    granite = config_of(header_of("granite", 2))
    assert (granite["attention_multiplier"], granite["logits_scaling"]) == (0.25, 1.0)
    assert [layer.rope is None for layer in parse_config(config_of(header_of("smollm3", 8))).layers] == [
        *([False] * 3), True,
    ] * 2  # fmt: skip


def test_factors_of_longer_texts_are_refused_without_those_of_shorter_ones_and_beside_others(tmp_path, source):
    def factors(name, *numbers):
        return {name: ("F32", (len(numbers),), struct.pack(f"<{len(numbers)}f", *numbers))}

    long, short = (f"rope_factors_{which}.weight" for which in ("long", "short"))
    trained = {"llama.rope.scaling.original_context_length": 64}
    for tensors, more, field in (
        (factors(long, *[1.0] * 8), trained, short),
        (factors(short, *[1.0] * 8), trained, long),
        (factors(long, *[1.0] * 7) | factors(short, *[1.0] * 8), trained, long),
        (factors(long, *[1.0] * 8) | factors(short, *[1.0] * 7, 0.0), trained, short),
        (factors(long, *[1.0] * 8) | factors(short, *[1.0] * 8), {}, "llama.rope.scaling.original_context_length"),
        (factors(long, *[1.0] * 8) | factors("rope_freqs.weight", *[1.0] * 8), trained, long),
        (factors(long, *[1.0] * 8), {"llama.rope.scaling.type": "yarn"}, long),
    ):
        shutil.rmtree(tmp_path / "opened", ignore_errors=True)
        write_model(source, ("Q8_0",), tmp_path / "small.gguf", tmp_path / "opened", tensors, **vocabulary(**more))
        with pytest.raises(ModelLoadError) as caught:
            gguf_folder(tmp_path / "small.gguf", tmp_path / "cache")
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("architecture", "own", "field"),
    [
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "attention.sliding_window_pattern"),
        ("gemma3", {"attention.sliding_window_pattern": [1, 0]}, "attention.sliding_window_pattern"),
        ("gemma3", {"attention.sliding_window_pattern": -6}, "attention.sliding_window_pattern"),
        ("gemma3", {"attention.sliding_window": 0.5}, "attention.sliding_window"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"expert_count": 8}, "expert_count"),
        ("gemma2", {"attention.sliding_window_pattern": 3}, "attention.sliding_window_pattern"),
        ("gemma2", {"final_logit_softcapping": True}, "final_logit_softcapping"),
        ("phi3", {"rope.dimension_count": 18}, "rope.dimension_count"),
        ("phi3", {"rope.dimension_count": 7}, "rope.dimension_count"),
        ("olmo2", {"attention.sliding_window": 8}, "attention.sliding_window"),
        ("olmo2", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("glm4", {"rope.dimension_sections": [8, 12, 12, 0]}, "rope.dimension_sections"),
        ("granite", {"attention.scale": "1"}, "attention.scale"),
        ("granite", {"expert_count": 8}, "expert_count"),
        ("qwen2", {"attention.sliding_window_pattern": 2}, "attention.sliding_window_pattern"),
    ],
)
def test_what_an_architecture_does_not_read_is_refused_by_field(architecture, own, field):
    with pytest.raises(ModelLoadError) as caught:
        config_of(header_of(architecture, 2, **{**WINDOW, **own} if architecture.startswith("gemma") else own))
    assert caught.value.field == f"{architecture}.{field}"


def test_factors_of_frequencies_other_than_those_of_llama_3_are_refused(tmp_path, source):
    for factors in ([1.0] * 7 + [0.0], [float("nan")] * 8, [float("inf")] * 8, [1.0] * 7 + [2.0]):
        of_rope = {"rope_freqs.weight": ("F32", (8,), struct.pack("<8f", *factors))}
        shutil.rmtree(tmp_path / "opened", ignore_errors=True)
        write_model(source, ("Q8_0",), tmp_path / "small.gguf", tmp_path / "opened", of_rope, **vocabulary())
        with pytest.raises(ModelLoadError) as caught:
            gguf_folder(tmp_path / "small.gguf", tmp_path / "cache")
        assert caught.value.field == "rope_freqs.weight"
    for theta in (0.0, -1.0):
        shutil.rmtree(tmp_path / "opened")
        words = vocabulary(**{"llama.rope.freq_base": theta})
        write_model(source, ("Q8_0",), tmp_path / "small.gguf", tmp_path / "opened", of_rope, **words)
        with pytest.raises(ModelLoadError):
            gguf_folder(tmp_path / "small.gguf", tmp_path / "cache")


@pytest.mark.parametrize(
    ("split", "pieces"), [("smollm", 3), ("refact", 3), ("qwen2", 3), ("gpt-2", 1), ("dbrx", 1), ("gpt-4o", 1)]
)
def test_digits_are_split_as_the_vocabulary_says(tmp_path, source, split, pieces):
    tokens = [*(chr(code) for code in range(33, 127)), "12", "123"]
    words = vocabulary(**{
        "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["1 2", "12 3"],
        "tokenizer.ggml.token_type": [1] * len(tokens),
    })  # fmt: skip
    folder = gguf_folder(write(source, tmp_path, **words), tmp_path / "cache")
    assert len(Tokenizer.load(folder).encode("123")) == pieces + 1


@pytest.mark.parametrize(
    ("split", "words"), [("gpt-4o", ["Xx's", " a"]), ("tekken", ["Xx", "'s", " a"]), ("dbrx", ["Xx", "'s", " a"])]
)
def test_what_is_shortened_is_a_part_of_its_word_where_the_vocabulary_says_so(tmp_path, source, split, words):
    folder = gguf_folder(write(source, tmp_path, **vocabulary(**{"tokenizer.ggml.pre": split})), tmp_path / "cache")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = tokenizer.pre_tokenizer.pre_tokenize_str("Xx's a")
    assert [word.replace("\u0120", " ") for word, _ in found] == words


def pieces_of(text: str) -> list[str]:
    """SentencePiece's rule: of neighbours whose whole is a piece, those with the highest score, the first among equal
    ones, become one, until there are none."""
    found = list(("\u2581" + text).replace(" ", "\u2581"))
    while True:
        wholes = [(PIECES.index(a + b), at) for at, (a, b) in enumerate(itertools.pairwise(found)) if a + b in PIECES]
        if not wholes:
            return [part for piece in found for part in ([piece] if piece in PIECES else in_bytes(piece))]
        _, at = min(wholes)
        found[at : at + 2] = ["".join(found[at : at + 2])]


def in_bytes(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]


@given(text=st.text(st.sampled_from("aetn \u00fcx\n\U0001f600"), min_size=1, max_size=24))
def test_pieces_of_sentencepiece_are_merged_by_their_scores(text):
    header = GgufHeader(Path("small.gguf"), b"", 0, {"general.architecture": "llama", **of_sentencepiece()}, ())
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(header)[0]))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *pieces_of(text)]
    assert tokenizer.decode(encoded.ids) == text


def test_a_vocabulary_without_a_space_in_front_keeps_text_and_runs_of_spaces(tmp_path, source):
    words = of_sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    words["tokenizer.ggml.tokens"] += ["   ", "\n\n"]  # as Gemma's users define them
    words["tokenizer.ggml.scores"] += [-1000.0, -1000.0]
    words["tokenizer.ggml.token_type"] += [4, 4]
    tokenizer = Tokenizer.load(gguf_folder(write(source, tmp_path, **words), tmp_path / "cache"))
    place = 3 + 256 + len(PIECES)
    text = "tan   ten\n\n an"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {place, place + 1} < set(tokenizer.encode(text))
    assert tokenizer.encode("t")[1:] == [3 + 256 + PIECES.index("t")]


def test_a_vocabulary_of_sentencepiece_is_served(tmp_path, source):
    folder = gguf_folder(write(source, tmp_path, **of_sentencepiece()), tmp_path / "cache")
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("tan a\u00fcx ten")
    assert tokenizer.decode(ids) == "tan a\u00fcx ten"
    assert ids[0] == 1


def test_damaged_headers_raise_nothing_untyped(tmp_path, source):
    whole = write(source, tmp_path, **vocabulary(**{"tokenizer.ggml.tokens": ["a", "b"]})).read_bytes()
    chooser, path = random.Random(0), tmp_path / "damaged.gguf"
    head = whole[: whole.index(b"blk.0") + 400]
    refused = 0
    for _ in range(300):
        raw = bytearray(whole[: chooser.choice([len(whole), len(whole), chooser.randrange(len(whole))])])
        for _ in range(chooser.choice([0, 1, 1, 4])):
            place = chooser.randrange(min(len(raw), len(head)) or 1)
            if place < len(raw):
                raw[place] = chooser.choice([0, 1, 8, 9, 255, chooser.randrange(256)])
        path.write_bytes(raw)
        try:
            read_gguf(path)
        except ModelLoadError:
            refused += 1
    assert 30 < refused < 300


@pytest.mark.parametrize("shape", [(0, 32, 32), (1 << 40, 0, 32), (0,)])
def test_an_empty_tensor_is_refused_by_name(tmp_path, source, shape):
    name = "blk.0.ffn_up_exps.weight"
    path, more = tmp_path / "small.gguf", {name: ("F32", shape, b"")}
    write_model(source, ("Q8_0",), path, tmp_path / "opened", more, **vocabulary())
    with pytest.raises(ModelLoadError) as caught:
        read_gguf(path)
    assert caught.value.details["tensor"] == name


def test_no_more_of_a_file_than_its_header_is_read(tmp_path, source):
    path = write(source, tmp_path, **vocabulary())
    os.truncate(path, 1 << 30)  # sparse
    tracemalloc.start()
    try:
        header = read_gguf(path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert header.num_bytes == 1 << 30
    assert most_bytes < 32 << 20


def test_blocks_whose_scales_are_no_numbers_are_refused_by_tensor(tmp_path, source):
    path = write(source, tmp_path, **vocabulary())
    tensor = next(each for each in read_gguf(path).tensors if each.name == "blk.0.attn_v.weight")
    raw = bytearray(path.read_bytes())
    raw[tensor.begin : tensor.begin + 2] = b"\x00\x7e"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match="no number") as caught:
        Decoder.load(gguf_folder(path, tmp_path / "cache"), torch.float32, "cpu", kernels="torch")
    assert caught.value.details["tensor"] == "model.layers.0.self_attn.v_proj.weight"


def test_a_norm_in_blocks_is_refused_by_tensor(tmp_path, source):
    path, more = tmp_path / "small.gguf", {"output_norm.weight": ("Q8_0", (32,), bytes(34))}
    write_model(source, ("Q8_0",), path, tmp_path / "opened", more, **vocabulary())
    with pytest.raises(ModelLoadError, match="stored as Q8_0") as caught:
        Decoder.load(gguf_folder(path, tmp_path / "cache"), torch.float32, "cpu", kernels="torch")
    assert caught.value.details["tensor"] == "model.norm.weight"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("quantization", [each for each in QUANTIZATIONS if each != AS_STORED])
def test_codes_are_not_rounded_again(tmp_path, source, kind, quantization):
    write_model(source, (kind,), tmp_path / "small.gguf", tmp_path / "opened", **vocabulary())
    folder = gguf_folder(tmp_path / "small.gguf", tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"weight is stored in fewer bits already: take auto") as caught:
        Decoder.load(folder, torch.float32, "cpu", quantization=quantization)
    assert caught.value.field == "quantization"


def test_the_plan_knows_the_bytes_of_parts_that_are_opened_since_they_have_several_types(tmp_path, source):
    write_model(source, ("Q8_0", "Q5_1", "Q4_0"), tmp_path / "small.gguf", tmp_path / "opened", **vocabulary())
    folder = gguf_folder(tmp_path / "small.gguf", tmp_path / "cache")
    config = load_config(folder)
    with Checkpoint.of(folder) as checkpoint:
        whole, elsewhere = (WeightPlan.make(checkpoint, config, device=device) for device in ("cpu", "cuda"))
    assert not {spec for spec in elsewhere.specs.values() if spec.has_lows}
    assert len(elsewhere.specs) < len(whole.specs)
    assert not [name for name in whole.specs if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    decoder = Decoder.load(folder, torch.float32, "cpu", kernels="torch")
    plain = 4 * config.hidden_size * (2 * config.num_layers + 1 + config.vocab_size)
    assert whole.weight_bytes(4) == decoder.projection_bytes + plain
