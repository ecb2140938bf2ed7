"""What is no model folder is named for what it is, by the loaders that meet it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from shared.errors import ModelLoadError
from shared.model.config.folder import check_is_content, check_model_folder
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.model.weights.safetensors_files import checkpoint_files
from tests.demo import DEMO

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def write_adapter(folder: Path, **fields: object) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("config.json", load_config),
        ("tokenizer.json", Tokenizer.load),
        ("tokenizer_config.json", Tokenizer.load),
        ("model.safetensors", checkpoint_files),
    ],
)
def test_a_git_lfs_pointer(folder, name, load):
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelLoadError, match=r"is a Git LFS pointer, .* `git lfs pull`") as caught:
        load(folder)
    assert caught.value.details["file"] == name


def test_a_large_file_and_an_absent_one_are_no_pointers(tmp_path):
    (tmp_path / "long").write_text(POINTER + "x" * 1024)
    check_is_content(tmp_path / "long")
    check_is_content(tmp_path / "absent")


@pytest.mark.parametrize("load", [load_config, Tokenizer.load])
def test_a_gguf_file(tmp_path, load):
    path = tmp_path / "model-q4.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ModelLoadError, match=re.escape(f"{path} is a GGUF file")):
        load(path)


def test_a_folder_of_gguf_files(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF\x03\0\0\0")
    serve = re.escape(f"serve the file itself (`tandem serve --model {tmp_path / 'model-q4.gguf'}`)")
    with pytest.raises(ModelLoadError, match=f"holds a GGUF file, model-q4.gguf: {serve}"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"),
    [("m.gguf", "there is a GGUF file, m.gguf: serve the file"), ("pytorch_model.bin", "pytorch_model.bin is pickled")],
)
def test_weights_of_another_format_are_named(folder, name, what):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=f"has neither model.safetensors .*; {what}"):
        checkpoint_files(folder)


def test_one_of_a_models_files(folder):
    with pytest.raises(ModelLoadError, match=r"model.safetensors is a file; a model is a folder"):
        load_config(folder / "model.safetensors")


def test_an_adapter_beside_its_base_is_not_ignored(folder):
    write_adapter(folder, peft_type="LORA", base_model_name_or_path="org/base")
    with pytest.raises(ModelLoadError, match=r"has a LORA adapter beside the model .* merge it") as caught:
        load_config(folder)
    assert caught.value.details["file"] == "adapter_config.json"


def test_an_adapter_alone_names_its_base(tmp_path):
    write_adapter(tmp_path, peft_type="LORA", base_model_name_or_path="org/base")
    with pytest.raises(ModelLoadError, match="is a LORA adapter of org/base, not a model"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("content", ["not JSON", "[]", "{}"])
def test_an_adapter_of_unknown_kind(folder, content):
    (folder / "adapter_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match="has an adapter beside the model"):
        check_model_folder(folder)


@pytest.mark.parametrize("load", [load_config, Tokenizer.load])
def test_a_folder_that_cannot_be_looked_at(tmp_path, load):
    """As one in a folder that another user owns."""
    with pytest.raises(ModelLoadError, match="cannot be read: File name too long"):
        load(tmp_path / ("x" * 300))
