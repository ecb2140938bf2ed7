"""What clients call a model and its adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.router.edge.scheduling import is_visible_ascii
from services.router.edge.tenants.adapter_rights import AdapterRights
from services.router.placement.views import NamedAdapter
from shared.errors import InvalidRequest, ModelNotFound, NotFound, brief

MAX_ADAPTER_NAME_LEN = 256
ALL_ADAPTERS = AdapterRights({})
"""Rights by which every tenant may use every adapter."""


class NamesAdapters(Protocol):
    """What the names of a model's adapters mean."""

    def find(self, name: str) -> NamedAdapter | None:
        """The adapter of that name; None for an unknown name."""
        ...

    def all(self) -> list[NamedAdapter]:
        """All adapters, in the order of their names."""
        ...

    async def load(
        self, name: str, folder: str, admit: Callable[[NamedAdapter], None]
    ) -> tuple[NamedAdapter, list[str]]:
        """Gives a name to what lies in a folder on every worker; returns it and the workers that have it. Raises what
        one of them refuses it with, or `admit` once it is read, and then nothing has changed."""
        ...

    async def unload(self, name: str) -> list[str]:
        """Takes a name back; returns the workers that had it. Raises NotFound."""
        ...


class ChangesWeights(Protocol):
    """The weights of one model over its workers."""

    async def update(self, folder: str, timeout_s: float = 0.0) -> tuple[str, list[str]]:
        """Every worker gets the weights of a folder; returns their fingerprint and the workers' names. Raises what one
        of them refuses them with, and then nothing has changed."""
        ...

    async def sleep(self, names: Sequence[str] = (), timeout_s: float = 0.0) -> list[str]:
        """Lets the named workers, or all, free their weights; returns the names."""
        ...

    async def wake(self, names: Sequence[str] = ()) -> list[str]:
        """Lets the named workers, or all that sleep, load their weights again; returns the names."""
        ...

    def asleep(self) -> list[str]:
        """Names of the workers that sleep."""
        ...


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What clients call one model, and what administrators change of it."""

    name: str
    """The model's name in replies and in `/v1/models`."""
    aliases: tuple[str, ...] = ()
    """Further names that are accepted."""
    beside: tuple[str, ...] = ()
    """Other models' names, for messages."""
    adapters: NamesAdapters | None = None
    """Adapters of the model; None: there are none."""
    rights: AdapterRights = ALL_ADAPTERS
    """The tenants' rights to use adapters."""
    weights: ChangesWeights | None = None
    """None where the router has no workers."""

    def include(self, model: str) -> bool:
        """Whether it is one of its names, those of all tenants' adapters among them."""
        return model == self.name or model in self.aliases or self._any_adapter(model) is not None

    def adapter(self, model: str, tenant: str) -> NamedAdapter | None:
        """The adapter that is meant by its name, or by the model's name, a colon and its name; None where none is that
        the tenant may use."""
        found = self._any_adapter(model)
        return found if found is not None and self.rights.may_use(tenant, found.name) else None

    def adapters_of(self, tenant: str) -> list[NamedAdapter]:
        """The adapters that the tenant may use, by name."""
        known = [] if self.adapters is None else self.adapters.all()
        return [adapter for adapter in known if self.rights.may_use(tenant, adapter.name)]

    def _any_adapter(self, model: str) -> NamedAdapter | None:
        if self.adapters is None or not model or model == self.name or model in self.aliases:
            return None
        for base in (self.name, *self.aliases):
            if model.startswith(f"{base}:") and (found := self.adapters.find(model.removeprefix(f"{base}:"))):
                return found
        return self.adapters.find(model)

    async def load(self, adapter: str, folder: str) -> tuple[NamedAdapter, list[str]]:
        """Gives the name to what lies in a folder on every worker; returns it and the workers that have it. Raises
        InvalidRequest for a name that is a model's, QuotaExceeded beyond what its tenant may have, and what a worker
        refuses it with; then nothing has changed."""
        check_adapter_name(adapter)
        self.check_free(adapter)
        known = self.known_adapters
        return await known.load(adapter, folder, lambda read: self.rights.admit(read, known.all()))

    async def unload(self, adapter: str) -> list[str]:
        """Takes a name back; returns the workers that had it. Raises NotFound."""
        check_adapter_name(adapter)
        return await self.known_adapters.unload(adapter)

    @property
    def known_adapters(self) -> NamesAdapters:
        """Raises NotFound where the model has none."""
        if self.adapters is None:
            raise NotFound(f"{self.name} takes no adapters", field="model", value=self.name)
        return self.adapters

    @property
    def known_weights(self) -> ChangesWeights:
        """Raises NotFound where there are no workers."""
        if self.weights is None:
            raise NotFound(f"{self.name} has no workers", field="model", value=self.name)
        return self.weights

    def check_free(self, adapter: str) -> None:
        """Raises InvalidRequest for the name of an adapter by which clients mean a model, or might."""
        if adapter in (self.name, *self.aliases, *self.beside) or ":" in adapter:
            raise InvalidRequest(
                f"lora_name {adapter!r} is a model's name, or has a colon", field="lora_name", value=adapter
            )

    def check(self, model: str, tenant: str) -> None:
        """Passes for its names and for none; raises ModelNotFound (`model`) that says what is served. An adapter that
        the tenant may not use is answered as an unknown one, to the letter."""
        if not model or model == self.name or model in self.aliases or self.adapter(model, tenant) is not None:
            return
        # Sorted: which of several models answers shows nothing of whose adapter it is.
        served = [repr(name) for name in sorted((self.name, *self.beside))]
        verb = "is" if len(served) == 1 else "are"
        raise ModelNotFound(
            f"the model {brief(model, 100)!r} is not served here; {', '.join(served)} {verb}",
            field="model",
            value=brief(model, 100),
        )


def check_adapter_name(name: str) -> None:
    """Raises InvalidRequest (`lora_name`) for what cannot be an adapter's name."""
    if not 0 < len(name) <= MAX_ADAPTER_NAME_LEN or not is_visible_ascii(name):
        raise InvalidRequest(
            f"lora_name must be 1 to {MAX_ADAPTER_NAME_LEN} printable ASCII characters without spaces",
            field="lora_name",
            limit=MAX_ADAPTER_NAME_LEN,
        )
