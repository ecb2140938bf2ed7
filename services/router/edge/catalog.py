"""The models behind one front door, by the names that clients use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.router.edge.input_processor import InputProcessor
from services.router.placement.views import NamedAdapter


class Catalog:
    """All models, at least one; the first is what a request without a name gets."""

    def __init__(self, models: Sequence[InputProcessor]) -> None:
        """Their names are unique, aliases among them."""
        self.models = tuple(models)
        self._by_name: Mapping[str, InputProcessor] = {
            name: model for model in models for name in (model.names.name, *model.names.aliases)
        }

    @property
    def first(self) -> InputProcessor:
        """The model of requests that name none."""
        return self.models[0]

    def find(self, name: str) -> InputProcessor:
        """The model of this name or alias, or of an adapter of this name; the first for no name, and for an unknown
        one, which it refuses."""
        found = self._by_name.get(name)
        if found is None:
            found = next((model for model in self.models if model.names.include(name)), self.first)
        return found

    def entries(self) -> list[tuple[str, InputProcessor]]:
        """(name, model) of every name, aliases behind their model's own."""
        return list(self._by_name.items())

    def adapters(self, tenant: str) -> list[tuple[NamedAdapter, InputProcessor]]:
        """(adapter, its model) of all that the tenant may ask for by name."""
        return [(adapter, model) for model in self.models for adapter in model.names.adapters_of(tenant)]

    def not_ready_reasons(self) -> dict[str, str]:
        """What each model lacks to serve a prompt now; empty where nothing."""
        return {model.model_name: model.core.not_ready_reason() for model in self.models}

    def not_ready_reason(self) -> str:
        """Empty while any model can be served: one without workers does not take the others from their clients."""
        reasons = self.not_ready_reasons()
        if not all(reasons.values()):
            return ""
        if len(reasons) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
