"""A model or an adapter by its id at the Hugging Face Hub: fetched into the Hub client's own cache, or found there."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, ModelLoadError

SCHEME = "hf://"
_PART = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"^({_PART}/{_PART})(?:@([\w./-]+))?$")

_WANTED = ("*.json", "*.jinja", "*.safetensors")
"""Files of a model folder, without other formats of the same weights."""
_UNWANTED = ("original/*", "consolidated*", "onnx/*", "openvino/*", "*.index.fp*.json")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model at the Hub."""

    repo: str
    """ORG/NAME."""
    revision: str = ""
    """Branch, tag or commit; empty = the main branch."""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def hub_model(model: str, field: str = "model") -> HubModel | None:
    """The model that `hf://ORG/NAME[@REVISION]` or `ORG/NAME[@REVISION]` names; None for anything else, and for what
    exists here as a file or folder. Raises ConfigError (`field`) for an `hf://` that is no such name."""
    text = model.removeprefix(SCHEME)
    if text == model and os.path.exists(model):  # False too where it cannot be looked at: who reads it says why
        return None
    found = _ID.match(text)
    if found is not None:
        return HubModel(found[1], found[2] or "")
    if text != model:
        raise ConfigError(f"{field}: {model} is not hf://ORG/NAME or hf://ORG/NAME@REVISION", field=field, value=model)
    return None


def fetch(model: HubModel, field: str = "model") -> Path:
    """The folder, with everything fetched that the cache lacks. Files of an interrupted fetch are kept.

    Blocking; shows its progress on stderr where that is a terminal. Reads the Hub client's own variables: HF_TOKEN,
    HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT. Raises ModelLoadError (`field`): not there, not allowed, not reached.
    """
    # Imported here: it takes a while, and a model that lies here does not need it.
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP library's, as it calls it
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    endpoint = constants.ENDPOINT
    print(f"fetching {model} from {endpoint}", file=sys.stderr)
    try:
        folder = snapshot_download(
            model.repo,
            revision=model.revision or None,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except (HTTPError, OSError, errors.HfHubHTTPError, ValueError) as error:
        raise ModelLoadError(_why(model, endpoint, error), field=field, value=str(model)) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ModelLoadError(
            f"{model} at {endpoint} has no safetensors files: other formats, such as GGUF, are not supported",
            field=field,
            value=str(model),
        )
    return Path(folder)


def _why(model: HubModel, endpoint: str, error: Exception) -> str:
    """The remedy, in a sentence."""
    from huggingface_hub import errors

    token = "give a token of someone who may (HF_TOKEN, or `hf auth login`)"
    if isinstance(error, errors.GatedRepoError):
        return f"{model.repo} at {endpoint} is gated: accept its terms there, and {token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {model} here, and no model {model.repo} at {endpoint} for all to see: if it is "
            f"private, {token}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model.repo} at {endpoint} has no revision {model.revision!r}"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"{endpoint} does not accept the token for {model.repo}: {token}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            f"there is no folder {model} here, {model.repo} is not in the cache as a whole, and {endpoint} cannot be "
            "reached: fetch it where there is a network, or name a model folder"
        )
    kind = f"{type(error).__name__}: " if not isinstance(error, OSError) or not error.strerror else ""
    return (
        f"fetching {model} from {endpoint} was interrupted ({kind}{error}): the same command continues where it stopped"
    )
