"""The command line of each process of a local cluster, and the checks before any of them starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel

from services.kvstore.settings import KVStoreSettings
from services.local.devices import ON_CPU, DeviceShare, share_devices
from services.local.model_pools import ModelPools, PoolOptions
from services.local.spec import ClusterSpec
from services.router.configured import discovery_of
from services.router.settings import RouterSettings, ServedModelSettings
from services.worker.settings import WorkerSettings
from shared.config import ServiceSettings, load_settings
from shared.cores.core_choice import CoreShare
from shared.cores.topology import format_cpu_list
from shared.environment import check_variables
from shared.identity import WorkerRole
from shared.model.families.registry import load_config
from shared.model.ranks.shard import Degrees
from shared.settings.group import values_in_common

_SOME_ADDRESS = "127.0.0.1:1"
"""Address in commands that are checked and not run."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker before it starts."""

    role: WorkerRole
    name: str
    cores: CoreShare
    stores: str = ""
    """Its model's store nodes, name=host:port, comma-separated; empty = none."""
    share: DeviceShare = ON_CPU
    address: str = "127.0.0.1:0"
    """host:port that it serves on; port 0 = any free one."""
    pools: ModelPools | None = None
    """Pools of its model; None = those of the spec's first."""
    further: tuple[CoreShare, ...] = ()
    """Where its group is over several hosts, tried out on this one: the cores of each but the first."""
    host: int = 0
    """Which of its group's hosts this is; 0 is the worker itself."""
    meeting: str = _SOME_ADDRESS
    """host:port at which they meet."""

    @property
    def members(self) -> list[WorkerPlan]:
        """The processes that stand for the further hosts."""
        return [
            replace(self, name=f"{self.name}-host-{host}", cores=cores, host=host)
            for host, cores in enumerate(self.further, 1)
        ]


class ServiceCommands(Protocol):
    """Turns a place in the cluster into a command; tests put scripted processes in the services' places."""

    def check(self) -> None:
        """Raises ConfigError or ModelLoadError for what a service would refuse, before any starts. Blocking."""

    def kvstore(self, bind: str, redis_url: str) -> Sequence[str]:
        """The KV store on `bind`, its index in `redis_url`; it is the first store node where there are any."""

    def store_node(self, number: int, bind: str, redis_url: str) -> Sequence[str]:
        """A further store node, from 1 on by `ClusterSpec.store_names`, over the same index."""

    def worker(self, plan: WorkerPlan, kvstore: str) -> Sequence[str]:
        """One worker on the plan's address, `kvstore` being the store's host:port; or what stands for a further host
        of its group."""

    def router(
        self, workers: Mapping[WorkerRole, Mapping[str, str]], kvstore: str, stores: str = "", number: int = 0
    ) -> Sequence[str]:
        """A router before the workers, for each role name → host:port; `stores` as in WorkerPlan, of all models."""


class TandemCommands:
    """The real services, by the interpreter that runs the launcher.

    An option of the spec that is a setting of a service is a flag of it where it was given, be it as the default: else
    the environment, which the services inherit, may still say otherwise.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec

    def check(self) -> None:
        """See ServiceCommands."""
        plans = plan_workers(self._spec, [CoreShare((), 1)] * self._spec.num_processes)
        workers: dict[WorkerRole, dict[str, str]] = {}
        for plan in plans:
            workers.setdefault(plan.role, {})[plan.name] = _SOME_ADDRESS
        check_settings(
            kvstore=self.kvstore(_SOME_ADDRESS, "unix:///index"),
            worker=self.worker(replace(plans[-1], address=_SOME_ADDRESS), _SOME_ADDRESS),
            router=self.router(workers, _SOME_ADDRESS),
        )
        for pools in self._spec.pools:
            check_model(pools, {self._spec.degrees(role) for role, _ in pools.workers})

    def kvstore(self, bind: str, redis_url: str) -> Sequence[str]:
        """See ServiceCommands."""
        return self.store_node(0, bind, redis_url)

    def store_node(self, number: int, bind: str, redis_url: str) -> Sequence[str]:
        """See ServiceCommands."""
        spec = self._spec
        tiers: dict[str, object] = {}
        if spec.has_store:
            name = spec.store_names[number]
            tiers = {"name": name, "host_bytes": spec.store_host_bytes, "disk_bytes": spec.store_disk_bytes}
            if spec.store_disk_folder is not None:
                tiers["disk_folder"] = spec.store_disk_folder / (name if len(spec.store_names) > 1 else "")
        return self._command("kvstore", spec.pools[0], {"bind": bind, "redis_url": redis_url, **tiers})

    def worker(self, plan: WorkerPlan, kvstore: str) -> Sequence[str]:
        """See ServiceCommands."""
        pools = plan.pools or self._spec.pools[0]
        decided: dict[str, object] = {
            "name": plan.name,
            "bind": plan.address,
            "model": pools.model,
            "device": plan.share.device,
            "num_threads": plan.cores.num_threads,
            "cpu_affinity": format_cpu_list(plan.cores.cpus),
            "kvstore": kvstore,
            "store": plan.stores,
            **self._ranks(plan),
        }
        if plan.share.gpu_memory:
            decided["gpu_memory"] = plan.share.gpu_memory
        return self._command("worker" if pools.mode == "auto" else plan.role, pools, decided)

    def router(
        self, workers: Mapping[WorkerRole, Mapping[str, str]], kvstore: str, stores: str = "", number: int = 0
    ) -> Sequence[str]:
        """See ServiceCommands."""
        spec = self._spec
        first, *further = spec.pools
        decided: dict[str, object] = {
            "name": f"router-{number}",
            "http": spec.routers[number].http,
            "grpc": spec.routers[number].grpc,
            "served_model_name": spec.model_name,
            "kvstore": kvstore,
            "edge.batch.folder": batch_folder(spec.state_dir, spec.routers[number].name),
            **self._served(first, workers, stores),
        }
        if further:
            decided["models"] = {pools.name: self._served(pools, workers, stores) for pools in further}
        return self._command("router", first, decided)

    def _served(
        self, pools: ModelPools, workers: Mapping[WorkerRole, Mapping[str, str]], stores: str
    ) -> dict[str, object]:
        """The router's settings of one model."""
        return {
            **values_in_common(pools, ServedModelSettings),
            "model": str(pools.model),
            "mode": pools.mode,
            "stores": _those(stores, self._spec.stores_of(pools)),
            **_lists(pools, workers),
        }

    def _command(self, service: str, pools: ModelPools, decided: Mapping[str, object]) -> list[str]:
        """The service with what the launcher decides, and with the options of the cluster and of the model that are
        settings of it."""
        settings = SETTINGS[service]
        of_cluster = values_in_common(self._spec, settings)
        options = {name: value for name, value in of_cluster.items() if name not in PoolOptions.model_fields}
        options |= values_in_common(pools, settings)
        left = {name: value for name, value in options.items() if name not in decided}
        return command_line(service, settings, {**decided, **left, **self._traces(service)})

    def _ranks(self, plan: WorkerPlan) -> dict[str, object]:
        """How the worker is split over processes and hosts, where it is."""
        degrees = self._spec.degrees(plan.role)
        of_ranks = {"tp": degrees.tensor, "pp": degrees.pipeline, "ep": degrees.expert}
        ranks: dict[str, object] = {name: degree for name, degree in of_ranks.items() if degree > 1}
        if plan.further:
            ranks |= {"group_hosts": 1 + len(plan.further), "group_leader": plan.meeting}
        if plan.host:
            ranks["group_host_index"] = plan.host
        return ranks

    def _traces(self, service: str) -> dict[str, object]:
        """Flags of a service's spans: where they go, and for a router the share of requests traced."""
        spec = self._spec
        traces: dict[str, object] = {"traces.endpoint": spec.traces_endpoint} if spec.traces_endpoint else {}
        sample = 1.0 if spec.traces_sample is None and traces else spec.traces_sample
        if service == "router" and sample is not None:
            traces["traces.sample"] = sample
        return traces


def command_line(service: str, settings: type[BaseModel], values: Mapping[str, object]) -> list[str]:
    """The command that starts a service with these values of its settings, a nested one as `part.field`.

    Raises KeyError for a name that is no setting of it.
    """
    command = [sys.executable, "-m", f"services.{service}"]
    for name, value in values.items():
        _ = settings.model_fields[name.partition(".")[0]]
        text = json.dumps(value) if isinstance(value, tuple | dict) else str(value)
        command += [f"--{name.replace('_', '-')}", text]
    return command


def _lists(pools: ModelPools, workers: Mapping[WorkerRole, Mapping[str, str]]) -> dict[str, str]:
    """The settings `prefill` and `decode` of a model, of those of its workers that are there."""
    own = {name for _, name in pools.workers}
    lists = {
        str(role): ",".join(f"{name}={address}" for name, address in addresses.items() if name in own)
        for role, addresses in workers.items()
    }
    if pools.mode == "auto":
        lists[str(WorkerRole.PREFILL)] = lists[str(WorkerRole.DECODE)]
    return {role: named for role, named in lists.items() if named}


def batch_folder(state_dir: Path, router: str) -> Path:
    """Where a router of a local cluster keeps files and batches."""
    return state_dir / "batches" / router


def with_flags(command: Sequence[str], **values: str) -> list[str]:
    """The command with other values for flags that it has."""
    changed = list(command)
    for name, value in values.items():
        if (flag := f"--{name}") in changed:
            changed[changed.index(flag) + 1] = value
    return changed


def plan_workers(spec: ClusterSpec, shares: Sequence[CoreShare]) -> list[WorkerPlan]:
    """All workers by name (`prefill-0`, `decode-0`, …; `worker-0`, … in auto mode), one model after another, prefill
    first; `shares` are their processes' cores in that order. GPUs are dealt in the same order."""
    names = [(role, name, pools) for pools in spec.pools for role, name in pools.workers]
    of_ranks = iter(shares)
    cores_of = [
        [
            _joined([next(of_ranks) for _ in range(spec.degrees(role).num_ranks // spec.hosts(role))])
            for _ in range(spec.hosts(role))
        ]
        for role, _, _ in names
    ]
    devices = share_devices(spec.devices, [spec.degrees(role).num_ranks for role, _, _ in names], spec.gpu_memory)
    return [
        WorkerPlan(role, name, cores, share=share, pools=pools, further=tuple(further))
        for (role, name, pools), (cores, *further), share in zip(names, cores_of, devices, strict=True)
    ]


def _joined(shares: Sequence[CoreShare]) -> CoreShare:
    """The cores of a worker's processes together; it divides them again."""
    if len(shares) == 1:
        return shares[0]
    cpus = tuple(sorted({cpu for share in shares for cpu in share.cpus}))
    nodes = {share.node for share in shares}
    return CoreShare(cpus, sum(share.num_threads for share in shares), nodes.pop() if len(nodes) == 1 else None)


def _those(stores: str, names: Collection[str]) -> str:
    """The nodes of these names, of a list name=host:port."""
    return ",".join(entry for entry in stores.split(",") if entry.partition("=")[0] in names)


SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "kvstore": KVStoreSettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
    "worker": WorkerSettings,
    "router": RouterSettings,
}
"""By the module in `services` that each service is started from."""


def check_settings(*, router: Sequence[str], worker: Sequence[str], kvstore: Sequence[str]) -> None:
    """Reads the settings of three commands as the services will, the environment's among them.

    Raises ConfigError naming the setting or the variable.
    """
    check_variables((RouterSettings, WorkerSettings, KVStoreSettings))
    load_settings(KVStoreSettings, _flags(kvstore))
    load_settings(WorkerSettings, _flags(worker))
    settings = load_settings(RouterSettings, _flags(router))
    settings.tls.check("tls", mutual=True)
    settings.edge.tls.check("edge.tls", mutual=False)
    discovery_of(settings)


def check_model(pools: ModelPools, splits: Iterable[Degrees] = ()) -> None:
    """Reads what workers and routers read of a model before its weights, and the weights' headers.

    `splits`: how its workers split it over processes. Blocking. Raises ModelLoadError, ConfigError.
    """
    # Imported here: most commands need neither.
    from shared.model.text.chat_template import ChatTemplate, template_variables
    from shared.model.text.tokenizer import Tokenizer
    from shared.model.weights.safetensors_files import checkpoint_files

    folder = pools.model
    config = load_config(folder)
    for degrees in splits:
        degrees.check(config)
    tokenizer = Tokenizer.load(folder)
    variables = template_variables(pools.chat_template_kwargs)
    ChatTemplate.load(folder, tokenizer.special_tokens, pools.chat_template, variables)
    checkpoint_files(folder)


def _flags(command: Sequence[str]) -> list[str]:
    """The arguments of a command, without the interpreter and the module."""
    first = next((i for i, argument in enumerate(command) if argument.startswith("--")), len(command))
    return list(command[first:])
