"""What clients call a model."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ModelNotFound, brief


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What clients call one model."""

    name: str
    """In replies and in `/v1/models`."""
    aliases: tuple[str, ...] = ()
    """Further names that are let in."""
    beside: tuple[str, ...] = ()
    """Other models' names, for messages."""

    def include(self, model: str) -> bool:
        """Whether it is one of its names."""
        return model == self.name or model in self.aliases

    def check(self, model: str) -> None:
        """Passes for its names and for none; raises ModelNotFound (`model`) that says what is served."""
        if not model or self.include(model):
            return
        served = [repr(name) for name in (self.name, *self.beside)]
        verb = "is" if len(served) == 1 else "are"
        raise ModelNotFound(
            f"the model {brief(model, 100)!r} is not served here; {', '.join(served)} {verb}",
            field="model",
            value=brief(model, 100),
        )
