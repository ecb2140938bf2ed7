"""What lies where a model should: folders and files that are none are named for what they are."""

from __future__ import annotations

import json
from pathlib import Path

from shared.errors import ModelLoadError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
ADAPTER_FILE = "adapter_config.json"
GGUF_FILE = "model.gguf"
"""Name of the GGUF file in the folder that is made for it."""
GGUF_MAGIC = b"GGUF"
"""What a GGUF file begins with."""

_POINTER_START = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024  # the format's own limit
_WANTED = "a model is a folder in Hugging Face layout: config.json, tokenizer.json and safetensors files"


def check_folder(path: Path) -> None:
    """Raises ModelLoadError (`field` model) where `path` is no folder: missing, a GGUF file, one of a model's files; or
    one that this user may not look into."""
    try:
        if path.is_dir():
            (path / CONFIG_FILE).is_file()  # raises where what lies in it cannot be looked at
            return
        is_file = path.is_file()
    except OSError as error:
        raise _error(path, f"model folder {path} cannot be read: {error.strerror}") from error
    if not is_file:
        raise _error(path, f"model folder {path} does not exist")
    if is_gguf(path):
        raise _error(path, f"{path} is a GGUF file, which `tandem serve --model` takes; here {_WANTED}")
    raise _error(path, f"{path} is a file; {_WANTED}")


def check_model_folder(folder: Path) -> None:
    """As `check_folder`; also raises where the folder holds no model's configuration, or an adapter.

    An adapter beside a base model is refused too: other software applies it, so serving the base alone would be
    another model under the same name.
    """
    check_folder(folder)
    if (folder / ADAPTER_FILE).is_file():
        raise _error(folder, _adapter(folder), file=ADAPTER_FILE)
    if (folder / CONFIG_FILE).is_file():
        return
    if found := sorted(folder.glob("*.gguf")):
        raise _error(folder, f"{folder} holds {_gguf(found[0])}")
    raise _error(folder, f"{CONFIG_FILE} is missing from the model folder {folder}", file=CONFIG_FILE)


def check_is_content(path: Path) -> None:
    """Raises ModelLoadError (`file`) for a Git LFS pointer: what a clone without Git LFS has in a large file's
    place. Passes for a missing file."""
    try:
        if path.stat().st_size > _MAX_POINTER_BYTES:
            return
        with path.open("rb") as file:
            start = file.read(len(_POINTER_START))
    except OSError:
        return  # the reader raises the error
    if start == _POINTER_START:
        raise ModelLoadError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}, or download the "
            "model again",
            field="model",
            file=path.name,
        )


def is_gguf(path: Path) -> bool:
    """Whether the file is one of llama.cpp's format."""
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def other_weights(folder: Path) -> str:
    """What a folder without safetensors files has instead, as the end of a sentence; empty where nothing is known."""
    if found := sorted(folder.glob("*.gguf")):
        return f"; there is {_gguf(found[0])}"
    if found := sorted(folder.glob("*.bin")):
        return f"; {found[0].name} is pickled, which is not loaded: publish the weights as safetensors"
    return ""


def _gguf(path: Path) -> str:
    return f"a GGUF file, {path.name}: serve the file itself (`tandem serve --model {path}`)"


def _adapter(folder: Path) -> str:
    kind, base = _adapter_fields(folder / ADAPTER_FILE)
    named = f"a {kind} adapter" if kind else "an adapter"
    if not (folder / CONFIG_FILE).is_file():
        of = f" of {base}" if base else ""
        return f"{folder} is {named}{of}, not a model: serve its base model, with this folder among its `adapters`"
    return (
        f"{folder} has {named} beside the model ({ADAPTER_FILE}): merge it into the model, or move it to a folder of "
        "its own, which `adapters` then names"
    )


def _adapter_fields(path: Path) -> tuple[str, str]:
    """(kind, base model), empty where unknown."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "", ""
    if not isinstance(fields, dict):
        return "", ""
    kind, base = fields.get("peft_type"), fields.get("base_model_name_or_path")
    return (kind if isinstance(kind, str) else ""), (base if isinstance(base, str) else "")


def _error(path: Path, message: str, file: str | None = None) -> ModelLoadError:
    return ModelLoadError(message, field="model", value=str(path), file=file)
