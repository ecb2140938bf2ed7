"""What placement may do with one worker: its view in the pools of its roles, and the ledger that keeps it current."""

from __future__ import annotations

import time
from collections.abc import Mapping

from services.router.placement.commitments import Ledger
from services.router.placement.views import NO_WORK, Pool, Tier, Work, WorkerView
from shared.identity import WorkerRole
from shared.rpc.convert import roles_from_proto, step_times_from_proto
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.sizing.step_time import StepKinds, StepTimes


class Standing:
    """Between `begin` and `end` the worker is connected; then, unless it is retired, one view of it is in the pool
    of each of its roles.

    Used from the event loop's thread alone. What concerns a request does nothing while the worker is not connected.
    """

    def __init__(self, name: str, label: tuple[str, ...], pools: Mapping[WorkerRole, Pool]) -> None:
        """`pools` are the placement's, by the roles in which the router uses the worker."""
        self.load = types_pb2.Load()
        """The worker's newest load report."""
        self.retired = False
        """No new work for it, and its name in the pool may be another link's."""
        self.suspicion = ""
        """Why it gets no new work although it is connected; empty where it is well."""
        self.num_adapters = 0
        """Adapters with a name; none while the worker is not connected."""
        self.num_ready_adapters = 0
        """Adapters of these that are ready to compute with."""
        self._name = name
        self._label = label
        self._pools = pools
        self._roles = frozenset(pools)  # which it has just now
        self._ledger: Ledger | None = None
        self._refused = False
        self._misfit = ""

    @property
    def queued(self) -> Work:
        """The prompt tokens that it still has to compute, by the router's view; none while not connected."""
        return self._ledger.view.queued if self._ledger is not None else NO_WORK

    def tier_of(self, adapter: str) -> Tier:
        """Where the worker has the adapter of this digest, by its last list."""
        return Tier.FOLDER if self._ledger is None else self._ledger.view.adapters.get(adapter, Tier.FOLDER)

    @property
    def num_open(self) -> int:
        """Commitments of this router that are not released."""
        return self._ledger.num_open if self._ledger is not None else 0

    def begin(self, welcome: types_pb2.Welcome, suspicion: str) -> None:
        """The worker is connected; it holds nothing of this router's."""
        self.load = types_pb2.Load(num_free_blocks=welcome.num_blocks, num_total_blocks=welcome.num_blocks)
        view = WorkerView(
            self._name,
            num_free_blocks=welcome.num_blocks,
            num_total_blocks=welcome.num_blocks,
            num_requests=0,
            max_num_seqs=welcome.max_num_seqs,
            num_queued_tokens=0,
            label=self._label,
            max_step_tokens=welcome.max_num_batched_tokens,
        )
        self._ledger = Ledger(view)
        self._refused = False
        self._misfit = ""
        self.suspect(suspicion)
        self._roles = frozenset(self._pools)
        if not self.retired:
            for pool in self._pools.values():
                pool.add(view)

    def end(self) -> None:
        """The worker is lost, or left."""
        self._ledger = None
        self.num_adapters = self.num_ready_adapters = 0
        if not self.retired:  # else another link may have this name by now
            self._leave_pools()

    def retire(self) -> None:
        """No new work from now on."""
        self.retired = True
        self._leave_pools()

    def suspect(self, why: str) -> None:
        """Keeps new work away, until it is called with an empty reason."""
        self.suspicion = why
        self._set_accepting()

    def set_misfit(self, why: str) -> None:
        """Keeps new work away from a worker of other weights than the fleet's, until it is called with an empty
        reason."""
        self._misfit = why
        self._set_accepting()

    def refuse(self) -> None:
        """The worker was full although our view had room: no more work until its next report."""
        self._refused = True
        self._set_accepting()

    def report(self, load: types_pb2.Load) -> None:
        """Takes the worker's report."""
        self.load = load
        if self._ledger is None:
            return
        view = self._ledger.view
        view.num_total_blocks = load.num_total_blocks
        view.adapter_room = load.adapter_room if load.HasField("adapter_room") else None
        view.least_slack_s = load.least_slack_s if load.HasField("least_slack_s") else None
        self._refused = False
        self._set_accepting()
        if not self.retired:
            self._follow_roles(view, load)
            for role in self._roles:
                self._pools[role].update_routers(self._name, load.routers)
        self._ledger.report(
            num_free_blocks=load.num_free_blocks,
            num_requests=load.num_running + load.num_waiting,
            queued=Work(load.num_queued_tokens, load.num_queued_pairs),
            now_s=time.perf_counter(),
            num_decoding=load.num_decoding,
            num_context_tokens=load.num_context_tokens,
            num_promised=load.num_promised,
            num_promised_tokens=load.num_promised_tokens,
        )
        self._take_times(view, step_times_from_proto(load.step_times) if load.HasField("step_times") else None)

    def _take_times(self, view: WorkerView, own: StepTimes | None) -> None:
        """Takes the worker's own fit of its steps, as far as it is founded. Call it once the view is current."""
        kinds = StepKinds(self.load.num_batch_kinds, self.load.num_chunk_kinds)
        if (view.times is None) != (own is None):
            for role in self._roles:
                self._pools[role].version += 1
        first = self._pools[min(self._pools)]  # a worker of two roles is one of each pool, and judged in the same one
        view.times = own if self.retired else first.founded.times(view, own, kinds)

    def has_adapters(self, adapters: types_pb2.AdapterList) -> None:
        """All adapters that the worker knows now."""
        if self._ledger is not None:
            view = self._ledger.view
            view.adapters = {item.digest: _tier(item) for item in adapters.adapters}
            view.loading_adapters = frozenset(item.digest for item in adapters.adapters if item.loading)
            self.num_adapters = len({item.digest for item in adapters.adapters if item.name})
            self.num_ready_adapters = len({item.digest for item in adapters.adapters if item.name and item.resident})

    def commit(self, request_id: str, work: Work, num_blocks: int, num_answer_tokens: int) -> None:
        """A request was placed there: placement counts its work, its blocks and its answer from now on."""
        if self._ledger is not None:
            self._ledger.commit(request_id, work, num_blocks=num_blocks, num_answer_tokens=num_answer_tokens)

    def sent(self, request_id: str) -> None:
        """The command that begins the request is on its way."""
        if self._ledger is not None:
            self._ledger.sent(request_id, time.perf_counter())

    def acknowledged(self, request_id: str) -> None:
        """The worker answered that command: its next report counts the request."""
        if self._ledger is not None:
            self._ledger.acknowledged(request_id)

    def computed(self, request_id: str) -> None:
        """The request's first token came: none of its prompt is queued there any more."""
        if self._ledger is not None:
            self._ledger.computed(request_id)

    def release(self, request_id: str) -> None:
        """The request is over for this worker."""
        if self._ledger is not None:
            self._ledger.release(request_id)

    def _follow_roles(self, view: WorkerView, load: types_pb2.Load) -> None:
        """A worker may take up a role, or leave one; a report without roles changes nothing."""
        roles = roles_from_proto(load.roles) & self._pools.keys() if load.roles else self._roles
        for role in self._roles - roles:
            self._pools[role].remove(self._name)
        for role in roles - self._roles:
            self._pools[role].add(view)
        self._roles = frozenset(roles)

    def _leave_pools(self) -> None:
        for pool in self._pools.values():
            pool.remove(self._name)
            pool.founded.forget(self._name)  # also where it was in no pool just now

    def _set_accepting(self) -> None:
        if self._ledger is not None:
            self._ledger.view.accepting = not (self.load.draining or self._refused or self.suspicion or self._misfit)


def _tier(adapter: types_pb2.Adapter) -> Tier:
    return Tier.READY if adapter.resident else Tier.HOST if adapter.on_host else Tier.FOLDER
