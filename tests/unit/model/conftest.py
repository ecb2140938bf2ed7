"""Small model folders that the tests of this package share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from tests.demo import DEMO

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "Numbers 1234567890 and symbols !?()[]{}<>|/\\ are part of the text too.",
    "Grüße aus Köln, naïve café, 日本語のテキスト, emoji 🎉🚀 and tabs\tand\nnew lines.",
] * 4


def write_tokenizer(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """Save a tokenizer in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_backend() -> Tokenizer:
    """In the manner of Llama 3: regex split, byte-level BPE, begin token by template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>", "<|turn|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("é ß", special=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
    )
    return backend


def byte_fallback_backend() -> Tokenizer:
    """In the manner of Llama 2 and Mistral: word markers, unknown characters as byte tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False)
    backend.train_from_iterator([text.encode("ascii", "ignore").decode() for text in CORPUS], trainer)
    # Byte tokens are ordinary vocabulary in such models: keep only the three as special.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-3-like tokenizer."""
    return write_tokenizer(
        tmp_path_factory.mktemp("byte_level"),
        byte_level_backend(),
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|turn|>"],
    )


@pytest.fixture(scope="session")
def byte_fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral-like tokenizer."""
    return write_tokenizer(
        tmp_path_factory.mktemp("byte_fallback"),
        byte_fallback_backend(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback", "demo"])
def tokenizer_folder(request: pytest.FixtureRequest, byte_level_folder: Path, byte_fallback_folder: Path) -> Path:
    """Each kind of tokenizer in turn, the demo model's among them."""
    return {"byte_level": byte_level_folder, "byte_fallback": byte_fallback_folder, "demo": DEMO}[request.param]
