"""A GGUF file's metadata by name and type."""

from __future__ import annotations

from shared.errors import ModelLoadError
from shared.model.gguf.header import GgufHeader, Value


class Metadata:
    """Metadata by name. Raises ModelLoadError (`field`) for what is missing or of another type."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.prefix = f"{self.text('general.architecture')}."

    def fault(self, name: str, problem: str) -> ModelLoadError:
        file = self.header.path
        return ModelLoadError(f"{file}: {name} {problem}", field=name, file=file.name)

    def own(self, name: str, default: Value | None = None) -> Value | None:
        """A value under the architecture's name."""
        return self.header.metadata.get(self.prefix + name, default)

    def text(self, name: str) -> str:
        found = self.header.metadata.get(name)
        if not isinstance(found, str):
            raise self.fault(name, f"must be a text, found {type(found).__name__}")
        return found

    def size(self, name: str, default: int | None = None) -> int:
        found = self.own(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            shown = f"a list of {len(found)}" if isinstance(found, list) else repr(found)
            raise self.fault(self.prefix + name, f"must be a whole number above 0, found {shown}")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        found = self.own(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise self.fault(self.prefix + name, f"must be a number, found {found!r}")
        return float(found)

    def texts(self, name: str) -> list[str]:
        found = self.header.metadata.get(name)
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise self.fault(name, "must be a list of texts")
        return [str(item) for item in found]

    def token(self, name: str) -> int | None:
        found = self.header.metadata.get(f"tokenizer.ggml.{name}")
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise self.fault(f"tokenizer.ggml.{name}", f"must be a token's id, found {found!r}")
        return found
