"""How a model's hidden states become an embedding: as its folder says, in the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.engine.sampling_params import Pooling
from shared.errors import InvalidRequest, ModelLoadError

PoolingName = Literal["auto", "last", "mean", "none"]
_MODES: Mapping[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The kind of pooling that the router serves, or the reason why it serves none."""

    pooling: Pooling = ""
    is_normalized: bool = True
    """Embeddings have length 1."""
    reason: str = "edge.pooling is none"
    """Why there is no pooling, where `pooling` is empty."""

    @classmethod
    def load(cls, folder: Path, setting: PoolingName) -> PoolingConfig:
        """`auto`: as `modules.json` and `1_Pooling/config.json` say. Raises ModelLoadError for files that are no
        JSON objects."""
        if setting == "none":
            return cls()
        if setting != "auto":
            return cls(setting)
        path = folder / "1_Pooling" / "config.json"
        if not path.is_file():
            return cls(reason="its folder has no 1_Pooling/config.json, and edge.pooling is auto")
        content = _read(path)
        modes = [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
        modules = folder / "modules.json"
        kinds = [str(module.get("type")) for module in _read(modules)] if modules.is_file() else []
        unknown = [kind for kind in kinds if kind.rpartition(".")[2] not in ("Transformer", "Pooling", "Normalize")]
        if len(modes) != 1 or modes[0] not in _MODES:
            return cls(reason=f"its pooling is {', '.join(modes) or 'none'}, served are last token and mean")
        if unknown:
            return cls(reason=f"it has a module {unknown[0]} behind the pooling")
        return cls(_MODES[modes[0]], not kinds or any(kind.endswith("Normalize") for kind in kinds))

    def check(self) -> Pooling:
        """The pooling; raises InvalidRequest (`model`) where the model embeds nothing."""
        if not self.pooling:
            raise InvalidRequest(f"model: it gives no embeddings: {self.reason}", field="model")
        return self.pooling


def _read(path: Path) -> Any:
    try:
        content = json.loads(path.read_text())
        if path.name == "modules.json":
            assert all(isinstance(module, dict) for module in content)
        else:
            assert isinstance(content, dict)
    except (OSError, ValueError, AssertionError, TypeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error or 'not as expected'}", file=path.name) from error
    return content
