"""One model behind the router: its tokenizer and template, its workers, its queue and placement, its edge."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import grpc

from services.router.cache.servicer import PrefixReader
from services.router.configured import discovery_of
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.edge.input_processor import InputProcessor
from services.router.edge.model_names import ModelNames
from services.router.edge.tenants.adapter_rights import AdapterRights
from services.router.edge.tenants.rate_limits import RateLimits
from services.router.edge.text.generation_defaults import NO_DEFAULTS, recommended
from services.router.edge.text.pooling import PoolingConfig
from services.router.placement.policy import Placement
from services.router.placement.split import SplitController
from services.router.settings import RouterSettings
from services.router.views.attribution.better_split import UsedFleet
from services.router.views.metrics import RouterMetrics
from services.router.views.observed import OBSERVED, RouterSources
from services.router.views.request_log import RequestLog
from services.router.views.status import cluster_status
from services.router.views.traces.call_trace import CallTraces
from services.router.views.vllm_names import VLLM, vllm_labels
from services.router.workers.fleet import Fleet
from services.router.workers.liveness import LivenessLimits
from shared.kv_index.client import KVStoreClient
from shared.model.families.registry import load_config
from shared.model.text.chat_template import ChatTemplate, template_variables
from shared.model.text.texts_digest import texts_digest
from shared.model.text.tokenizer import Tokenizer
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.structure.compiler import StructureCompiler


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts that all models of a router share."""

    store: KVStoreClient | None
    """The index; block hashes begin with the model's fingerprint, so that models never meet there."""
    rates: RateLimits
    """A client's limits hold over all models."""
    credentials: grpc.ChannelCredentials | None
    token: str
    traces: CallTraces = field(default_factory=CallTraces)


class ServedModel:
    """Everything that one model needs. Requests of different models meet nowhere but in the process."""

    def __init__(self, settings: RouterSettings, beside: tuple[str, ...], around: Surroundings) -> None:
        """`settings`: the router's, as this model sees them (`RouterSettings.each_model`); `beside`: the other models'
        names. Reads tokenizer and template; raises ConfigError, ModelLoadError."""
        self.settings = settings
        self.name = settings.model_name
        discovery = discovery_of(settings)
        tokenizer = Tokenizer.load(settings.model)
        variables = template_variables(settings.chat_template_kwargs)
        template = ChatTemplate.load(settings.model, tokenizer.special_tokens, settings.chat_template, variables)
        config = load_config(settings.model)
        defaults = recommended(settings.model, config) if settings.edge.generation_defaults else NO_DEFAULTS
        structures = StructureCompiler(lambda: tokenizer, config.eos_token_ids)
        structures.start(tokenizer.vocab_size)
        tenants = {"default", *settings.edge.tenants, *settings.admission.tenant_weights}
        self.metrics = RouterMetrics(self.name, sorted(tenants), settings.name)
        self.fleet = Fleet(
            settings.name,
            discovery,
            lambda: self.dispatcher.pump(),
            collocated=settings.mode == "collocated",
            limits=LivenessLimits(settings.suspect_after_s, settings.give_up_after_s),
            credentials=around.credentials,
            token=around.token,
            texts_digest=texts_digest(settings.model),
            tpot_target_s=settings.targets.tpot_s,
        )
        self.lookup = PrefixLookup(around.store, self.fleet)
        targets = settings.judged_by
        self.placement = Placement(
            settings.placement.config(settings.max_queued_tokens, targets.ttft_s, targets.tpot_s),
            seed=zlib.crc32(settings.name.encode()),
        )
        self.requests = RequestLog(self.metrics, settings.judged_by)
        self.dispatcher = Dispatcher(
            self.fleet,
            self.placement,
            self.lookup,
            settings.dispatch_config(),
            self.requests,
            settings.moves,
            settings.targets.tpot_s,
            self.requests.recorder.began,
        )
        self._show_figures()
        self.reader = PrefixReader(tokenizer, template)
        self.edge = InputProcessor(
            self.dispatcher,
            tokenizer,
            template,
            self.name,
            settings.edge,
            structures,
            defaults,
            names=ModelNames(
                self.name,
                settings.aliases,
                beside,
                self.fleet.adapters,
                AdapterRights(settings.edge.tenants),
                self.fleet.weights,
            ),
            rates=around.rates,
            ledger=self.metrics,
            traces=around.traces,
            pooling=PoolingConfig.load(settings.model, settings.edge.pooling),
            sessions=self.fleet,
        )

    def _show_figures(self) -> None:
        """Adds the figures that are read when the metrics page is made."""
        sources = RouterSources(self.dispatcher, self.fleet, self.lookup, self.metrics, self.split)
        self.metrics.metrics.observe(OBSERVED, sources)
        if self.settings.vllm_metrics:
            self.metrics.metrics.observe(VLLM, sources, vllm_labels(self.name))

    @property
    def split(self) -> SplitController | None:
        """Which workers are to decode, in mode auto."""
        return self.placement.split if self.settings.mode == "auto" else None

    def used_fleet(self) -> UsedFleet | None:
        """Its workers as they are used just now; None before any is connected."""
        mode, fleet = self.settings.mode, self.fleet
        prefills = list(fleet.prefill_pool) if mode == "disaggregated" else []
        decodes = list(fleet.decode_pool)
        if fleet.layout is None or not decodes:
            return None
        preferred = self.placement.split.split.decodes if mode == "auto" else frozenset()
        num_decoding = sum(view.name in preferred for view in decodes) or len(decodes)
        return UsedFleet(mode, prefills, decodes, num_decoding, fleet.layout.groups)

    def status(self) -> inference_pb2.ClusterStatus:
        """This model's part of the cluster, as the router sees it."""
        now = cluster_status(self.name, self.fleet, self.dispatcher, self.lookup, self.metrics, self.split)
        settings = self.settings
        now.refused_above_ms = settings.admission.ttft_target_s * 1e3
        now.max_queued_tokens = settings.max_queued_tokens
        now.router_name, now.mode, now.queue_limit = settings.name, settings.mode, settings.queue_limit
        now.not_ready_reason = self.dispatcher.not_ready_reason()
        now.ready = not now.not_ready_reason
        return now

    async def close(self) -> None:
        """Ends the sessions. Behind the drain and the servers' end."""
        await self.fleet.close()
        self.metrics.close()
