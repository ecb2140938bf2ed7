"""The base of simulated routers: they see workers through reports, send commands, receive tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from loadtest.simulator.fleet import Report, World
from loadtest.simulator.request import SimRequest
from loadtest.simulator.worker import Calls, Worker
from services.router.placement.commitments import Ledger
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import NO_WORK, PlacementRequest, Pool, Tier, Work, WorkerView
from shared.identity import WorkerRole
from shared.kv.groups import KVGroups


class SimRouter(ABC):
    """Uses the real router's views and ledgers."""

    def __init__(self, world: World, workers: Mapping[str, Worker], name: str = "") -> None:
        self.world, self.workers = world, workers
        self.predictor = TtftPredictor()
        self.prefill_pool, self.decode_pool = Pool(name), Pool(name)
        self.calls = Calls(self._on_first_token, self._on_joined, self._on_done)
        self._pools = {WorkerRole.PREFILL: self.prefill_pool, WorkerRole.DECODE: self.decode_pool}
        self._ledgers: dict[str, Ledger] = {}
        self._draining: set[str] = set()
        for worker in workers.values():
            self.add_worker(worker)
        world.listeners.append(self)

    @property
    def message_s(self) -> float:
        """One-way latency to a worker."""
        return next(iter(self.workers.values())).spec.message_s

    def add_worker(self, worker: Worker) -> None:
        """A worker has connected; it is in `workers`."""
        num_blocks = worker.spec.num_blocks
        view = WorkerView(
            worker.name,
            num_blocks,
            num_blocks,
            0,
            worker.spec.max_num_seqs,
            0,
            max_step_tokens=worker.spec.max_num_batched_tokens,
            adapters=worker.adapters.listed(),
        )
        self._ledgers[worker.name] = Ledger(view)
        for role in worker.roles:
            self._pools[role].add(view)
        self.changed()

    def drain_worker(self, name: str) -> None:
        """No new requests for this worker; those that it has go on."""
        self._draining.add(name)
        self._ledgers[name].view.accepting = False

    def remove_worker(self, name: str) -> None:
        """A drained worker has gone."""
        for pool in self._pools.values():
            pool.remove(name)

    @abstractmethod
    def submit(self, request: SimRequest) -> None:
        """A request arrives."""

    @abstractmethod
    def changed(self) -> None:
        """A worker's capacity may have increased."""

    def on_report(self, worker: str, report: Report) -> None:
        """See `Listener`."""
        ledger = self._ledgers.get(worker)
        if ledger is None:
            return  # it has not connected yet
        view = ledger.view
        view.accepting = worker not in self._draining
        if report.adapters is not None:
            view.adapters = report.adapters
        view.loading_adapters = report.loading_adapters
        view.adapter_room = report.adapter_room
        view.least_slack_s = report.least_slack_s
        ledger.report(
            num_free_blocks=report.num_free_blocks,
            num_requests=report.num_running + report.num_waiting,
            queued=Work(report.num_queued_tokens, report.num_queued_pairs),
            now_s=self.world.clock.now_s,
            num_decoding=report.decoding.num_sequences,
            num_context_tokens=report.decoding.num_context_tokens,
            num_promised=report.promised.num_sequences,
            num_promised_tokens=report.promised.num_context_tokens,
        )
        pool = self._pools[min(self.workers[worker].roles)]
        view.times = pool.founded.times(view, report.step_times, report.step_kinds)
        self.changed()

    def need(self, request: SimRequest) -> PlacementRequest:
        """The request for placement, with the prefix hits in the index now."""
        hits = self.world.index.match(request.runs, request.num_prompt_tokens)
        return PlacementRequest(
            request.num_prompt_tokens,
            KVGroups(self.world.index.block_size),
            hits,
            request.session,
            adapter=request.adapter,
        )

    def ledger(self, worker: str) -> Ledger:
        """This router's ledger of a worker."""
        return self._ledgers[worker]

    def commit(self, request: SimRequest, need: PlacementRequest, decode: str, prefill: str) -> None:
        """Counts the request on its workers; an empty `prefill`: the decode worker computes the prompt."""
        now_s = self.world.clock.now_s
        request.decode, request.prefill, request.placed_s = decode, prefill, now_s
        work = need.work(prefill or decode)
        view = self._ledgers[prefill or decode].view
        request.ahead, request.tier = view.queued, view.adapters.get(request.adapter, Tier.FOLDER)
        here = NO_WORK if prefill else work
        self._ledgers[decode].commit(
            request.name,
            here,
            num_blocks=need.num_missing_blocks(decode),
            num_answer_tokens=request.num_prompt_tokens,
        )
        self._ledgers[decode].sent(request.name, now_s)
        if prefill:
            self._ledgers[prefill].commit(request.name, work, num_blocks=0)

    def release(self, request: SimRequest) -> None:
        """The request has ended on its workers."""
        self._ledgers[request.decode].release(request.name)
        if request.prefill:
            self._ledgers[request.prefill].release(request.name)

    def refuse(self, request: SimRequest) -> None:
        """The client gets an error in place of an answer."""
        request.refused, request.refused_s = True, self.world.clock.now_s

    def _on_first_token(self, request: SimRequest, on_worker_s: float, num_cached: int) -> None:
        """As `Attempt` learns of it."""
        now_s = request.first_token_s = self.world.clock.now_s
        self._ledgers[request.prefill or request.decode].computed(request.name)
        self.predictor.ttft.observe(request.predicted_ttft_s or 0.0, now_s - request.placed_s)
        own = Work.of(request.num_prompt_tokens - num_cached, num_cached)
        if request.adapter_s:
            self.predictor.observe_adapter(request.adapter_s, request.tier)
            on_worker_s -= request.adapter_s
        if request.prefilled_here:
            self.predictor.observe_here(request.ahead, own, on_worker_s)
        else:
            self.predictor.observe_prefill(request.ahead, own, on_worker_s)
            self.predictor.observe_hand_off(max(0.0, now_s - request.placed_s - on_worker_s - request.adapter_s))
        self.changed()

    def _on_joined(self, request: SimRequest) -> None:
        if request.prefill:
            self._ledgers[request.prefill].release(request.name)
            self.predictor.observe_gap(self.world.clock.now_s - request.first_token_s)

    def _on_done(self, request: SimRequest) -> None:
        request.finished_s = self.world.clock.now_s
        self.release(request)
        self.changed()
