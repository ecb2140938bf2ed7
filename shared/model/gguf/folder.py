"""A GGUF file as a model folder: `model.gguf`, and beside it what Hugging Face layout has, made of its metadata."""

from __future__ import annotations

import json
import shutil
from hashlib import blake2b
from pathlib import Path

from shared.errors import ModelLoadError
from shared.model.config.folder import GGUF_FILE, TOKENIZER_FILE
from shared.model.gguf.description import config_of
from shared.model.gguf.header import read_gguf
from shared.model.gguf.vocabulary import tokenizer_of

_BESIDE = (TOKENIZER_FILE, "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def gguf_folder(path: Path, cache: Path) -> Path:
    """The folder for a GGUF file, made anew in `cache` under a name that follows from the file's header; its weights
    stay where they are. A `tokenizer.json` beside the file, with what belongs to it, goes before the file's vocabulary.

    Raises ModelLoadError: as `read_gguf`, `config_of` and `tokenizer_of`; the folder cannot be written.
    """
    header = read_gguf(path)
    config = config_of(header)
    has_own = (path.parent / TOKENIZER_FILE).is_file()
    made = {"config.json": config}
    if not has_own:
        made[TOKENIZER_FILE], made["tokenizer_config.json"] = tokenizer_of(header)
    digest = blake2b(header.raw + str(path.resolve()).encode(), digest_size=8).hexdigest()
    folder = cache / f"{path.stem}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in made.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        for name in _BESIDE if has_own else ():
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, folder / name)
        link = folder / GGUF_FILE
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    except OSError as error:
        problem = f"no model folder can be made of {path}: {error}"
        raise ModelLoadError(problem, field="model", value=str(path)) from error
    return folder
