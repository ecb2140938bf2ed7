"""Settings of the router."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.router.admission.settings import AdmissionSettings, QueueSettings
from services.router.dispatch.waiting_room import DispatchConfig
from services.router.edge.settings import EdgeSettings
from services.router.picker.settings import PickerSettings
from services.router.placement.move_settings import MoveSettings
from services.router.placement.settings import PlacementSettings
from services.router.views.attribution.settings import TargetSettings
from services.router.views.attribution.verdict import Targets
from shared.address import parse_named
from shared.config import ServiceSettings
from shared.errors import ConfigError
from shared.kubernetes.settings import ApiServerSettings
from shared.rpc.fleet_settings import FleetSettings
from shared.settings.common import AliasSettings, ApiSettings, ModelName, ModeSettings, TemplateSettings
from shared.telemetry.settings import VllmMetricsSettings
from shared.telemetry.tracing.settings import RouterTracesSettings


class KubernetesSettings(ApiServerSettings):
    """Which Pods are workers, and how the API server is reached, which has to let the router list and watch them."""

    selector: str = ""
    """Label selector of the workers' Pods; needed with `discovery` kubernetes. Such as
    `app.kubernetes.io/instance=tandem,app.kubernetes.io/component=worker`."""


class ServedModelSettings(AliasSettings, ModeSettings, TemplateSettings):
    """One model behind the router: its folder, its workers and its store nodes."""

    model: Path
    """Model folder; the router reads its tokenizer and chat template."""
    prefill: str = ""
    """Prefill workers, name=host:port, comma-separated."""
    decode: str = ""
    """Decode workers, name=host:port, comma-separated."""
    workers_file: Path | None = None
    """YAML file that names the workers, in place of `prefill`, `decode` and `labels`; followed while the router runs.
    `workers: [{name, role: prefill | decode, address: host:port, label: zone/rack}]`."""
    labels: str = ""
    """Topology of the workers, name=zone/rack/domain, comma-separated, widest part first; empty = unknown."""
    stores: str = ""
    """Store nodes of the model, name=host:port or host:port, comma-separated, with the same names as in its workers'
    `store`: for `tandem cache`, and for health to name those that fail. The blocks of a node have one size."""


class ModelSettings(ServedModelSettings):
    """One more model behind the router, with workers of its own. What is not here holds for all models."""

    selector: str = ""
    """Label selector of its workers' Pods, with `discovery` kubernetes."""


class RouterSettings(
    ServiceSettings, FleetSettings, VllmMetricsSettings, QueueSettings, ApiSettings, ServedModelSettings
):
    """One router replica. The environment prefix is TANDEM_ROUTER_."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_ROUTER_"}
    )

    name: str = "router-0"
    """Unique among the routers of a cluster."""
    models: dict[ModelName, ModelSettings] = Field(default_factory=dict)
    """More models, by the name that clients ask for. Each has its own workers, queue and placement; limits, tenants and
    the index are shared. A request without a name gets the model of `model`."""
    discovery: Literal["list", "kubernetes"] = "list"
    """list: workers are named in `prefill` and `decode`, or in `workers_file`. kubernetes: they are the ready Pods that
    `kubernetes.selector` names. A Pod's name is the worker's; its label tandem-llm.io/role is prefill, decode,
    collocated or auto, its container port `session` the worker's port; where it stands is read from its labels
    topology.kubernetes.io/zone, tandem-llm.io/rack and tandem-llm.io/nvlink-domain."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """The Pods."""
    kvstore: str = ""
    """host:port of the KV store; empty = prompts are placed without an index."""
    max_queued_tokens: int = Field(default=2048, ge=1)
    """A prefill worker gets more work while it has fewer tokens than this to compute."""
    admission: AdmissionSettings = AdmissionSettings()
    """Order, bounds and targets of the queue."""
    targets: TargetSettings = TargetSettings()
    """By what requests count as good in the status."""
    placement: PlacementSettings = PlacementSettings()
    """How workers are scored."""
    moves: MoveSettings = MoveSettings()
    """Answers that move to other decode workers."""
    suspect_after_s: float = Field(default=1.0, ge=0.05, le=60)
    """A worker that sends no heartbeat for this long, or whose engine hangs, gets no new work. Seconds."""
    give_up_after_s: float = Field(default=5.0, ge=0.1, le=600)
    """Silence after which a worker is given up, and its requests move to other workers; a shorter stall is only a
    pause. Not below `suspect_after_s`. Seconds."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """Time for accepted requests to end after SIGTERM; meanwhile new ones are answered with 503. Seconds."""
    picker: PickerSettings = PickerSettings()
    """The endpoint picker for gateways."""
    traces: RouterTracesSettings = RouterTracesSettings()
    """The spans of its requests, and which of them are exported."""
    edge: EdgeSettings = EdgeSettings()
    """The HTTP and gRPC servers: API keys, tenants, limits."""

    @property
    def model_name(self) -> str:
        """What clients call the model of `model`."""
        return self.served_model_name or self.model.resolve().name

    def each_model(self) -> tuple[RouterSettings, ...]:
        """The settings as each model sees them, this one's first. Raises ConfigError (`models`) where a name stands
        for two models."""
        every = [self.model_copy(update={"models": {}}), *(self._of(*entry) for entry in self.models.items())]
        taken: set[str] = set()
        for each in every:
            for name in (each.model_name, *each.aliases):
                if name in taken:
                    raise ConfigError(f"models: {name!r} is the name of two models", field="models", value=name)
                taken.add(name)
        return tuple(every)

    def store_addresses(self) -> dict[str, str]:
        """host:port of each store node by its name; models may share nodes where their blocks have one size. Raises
        ConfigError (`stores`)."""
        found: dict[str, str] = {}
        for stores in (self.stores, *(model.stores for model in self.models.values())):
            for name, address in parse_named(stores, "stores", unnamed=True).items():
                if found.setdefault(name, address) != address:
                    raise ConfigError(f"stores: {name!r} has two addresses", field="stores", value=name)
        return found

    def _of(self, name: str, model: ModelSettings) -> RouterSettings:
        own = model.model_dump(exclude={"selector"})
        kubernetes = self.kubernetes.model_copy(update={"selector": model.selector})
        return self.model_copy(update={**own, "served_model_name": name, "kubernetes": kubernetes, "models": {}})

    @property
    def judged_by(self) -> Targets:
        """Which ended requests were good."""
        return Targets(self.targets.ttft_s or self.admission.ttft_target_s, self.targets.tpot_s)

    def dispatch_config(self) -> DispatchConfig:
        """What the dispatcher takes of these settings."""
        admission = self.admission.values_of(AdmissionSettings)
        return DispatchConfig(mode=self.mode, **self.values_of(QueueSettings), **admission)


def parse_labels(text: str, known: Set[str]) -> dict[str, tuple[str, ...]]:
    """`a=zone/rack,b=zone` by worker name; raises ConfigError (`labels`)."""
    labels: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, label = entry.partition("=")
        parts = tuple(label.split("/"))
        if not (name and equals and all(parts)):
            raise ConfigError(f"labels: {entry!r} is not name=part/part", field="labels")
        if name not in known:
            raise ConfigError(f"labels: there is no worker {name!r}", field="labels")
        labels[name] = parts
    return labels
