"""A digest by which router and workers check that they serve one model: a router has no weights for a fingerprint."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from shared.model.config.folder import CONFIG_FILE, TOKENIZER_FILE
from shared.model.config.json_fields import read_json_object


def texts_digest(folder: Path) -> str:
    """32 hexadecimal digits of a folder's configuration and vocabulary; empty where it lacks one of them, so that
    nothing can be compared. Blocking. Raises ModelLoadError for a configuration that cannot be read."""
    tokenizer = folder / TOKENIZER_FILE
    if not (folder / CONFIG_FILE).is_file() or not tokenizer.is_file():
        return ""
    digest = blake2b(json.dumps(read_json_object(folder / CONFIG_FILE), sort_keys=True).encode(), digest_size=16)
    digest.update(tokenizer.read_bytes())
    return digest.hexdigest()
