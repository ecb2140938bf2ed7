"""The base of simulated routers: they see workers through reports, send commands, receive tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from loadtest.simulator.decode_worker import DecodeWorker
from loadtest.simulator.fleet import Report, World
from loadtest.simulator.prefill_worker import PrefillWorker
from loadtest.simulator.request import SimRequest
from services.router.placement.commitments import Ledger
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import NO_WORK, PlacementRequest, Pool, Work, WorkerView


class SimRouter(ABC):
    """Uses the real router's views and ledgers."""

    def __init__(
        self,
        world: World,
        prefills: Mapping[str, PrefillWorker],
        decodes: Mapping[str, DecodeWorker],
        name: str = "",
    ) -> None:
        self.world, self.prefills, self.decodes = world, prefills, decodes
        self.predictor = TtftPredictor()
        self.prefill_pool, self.decode_pool = Pool(name), Pool(name)
        self._ledgers: dict[str, Ledger] = {}
        self._draining: set[str] = set()
        self._pairs_a_token = 0.0  # of the newest prompt: reports have tokens alone
        workers: list[PrefillWorker | DecodeWorker] = [*prefills.values(), *decodes.values()]
        for worker in workers:
            self.add_worker(worker)

    def add_worker(self, worker: PrefillWorker | DecodeWorker) -> None:
        """A worker has connected; it is in `prefills` or `decodes`."""
        num_blocks = worker.spec.num_blocks
        view = WorkerView(worker.name, num_blocks, num_blocks, 0, worker.spec.max_num_seqs, 0)
        self._ledgers[worker.name] = Ledger(view)
        (self.prefill_pool if isinstance(worker, PrefillWorker) else self.decode_pool).add(view)
        worker.reports.listen(self)
        self.changed()

    def drain_worker(self, name: str) -> None:
        """No new requests for this worker; those that it has go on."""
        self._draining.add(name)
        self._ledgers[name].view.accepting = False

    def undrain_worker(self, name: str) -> None:
        """Takes that back."""
        self._draining.discard(name)
        self._ledgers[name].view.accepting = True
        self.changed()

    def remove_worker(self, name: str) -> None:
        """A drained worker has gone."""
        self.prefill_pool.remove(name)
        self.decode_pool.remove(name)

    @abstractmethod
    def submit(self, request: SimRequest) -> None:
        """A request arrives."""

    @abstractmethod
    def changed(self) -> None:
        """A worker's capacity may have increased."""

    def on_report(self, worker: str, report: Report) -> None:
        """See `Listener`."""
        ledger = self._ledgers[worker]
        ledger.view.accepting = worker not in self._draining
        ledger.report(
            num_free_blocks=report.num_free_blocks,
            num_requests=report.num_requests,
            queued=Work(report.num_queued_tokens, report.num_queued_tokens * self._pairs_a_token),
            now_s=self.world.clock.now_s,
        )
        self.changed()

    def need(self, request: SimRequest) -> PlacementRequest:
        """The request for placement, with the prefix hits in the index now."""
        hits = self.world.index.match(request.runs, request.num_prompt_tokens)
        return PlacementRequest(request.num_prompt_tokens, self.world.spec.block_size, hits, request.session)

    def ledger(self, worker: str) -> Ledger:
        """This router's ledger of a worker."""
        return self._ledgers[worker]

    def commit(self, request: SimRequest, need: PlacementRequest, decode: str, prefill: str) -> None:
        """Counts the request on its workers; an empty `prefill`: the decode worker computes the prompt."""
        request.decode, request.prefill = decode, prefill
        request.prefilled_here = not prefill
        work = need.work(prefill or decode)
        self._pairs_a_token = work.pairs / work.tokens
        request.ahead = self._ledgers[prefill or decode].view.queued
        here = NO_WORK if prefill else work
        self._ledgers[decode].commit(request.name, here, num_blocks=need.num_missing_blocks(decode))
        self._ledgers[decode].sent(request.name, self.world.clock.now_s)
        if prefill:
            self._ledgers[prefill].commit(request.name, work, num_blocks=0)

    def release(self, request: SimRequest) -> None:
        """The request has ended on its workers."""
        self._ledgers[request.decode].release(request.name)
        if request.prefill:
            self._ledgers[request.prefill].release(request.name)

    def first_token(self, request: SimRequest, at_s: float, on_worker_s: float) -> None:
        """A worker produced a request's first token."""
        self.world.clock.at(at_s + self.world.spec.message_s, self._on_first_token, request, on_worker_s)

    def done(self, request: SimRequest) -> None:
        """A worker produced a request's last token."""
        self.world.clock.after(self.world.spec.message_s, self._on_done, request)

    def _on_first_token(self, request: SimRequest, on_worker_s: float) -> None:
        request.first_token_s = self.world.clock.now_s
        self._ledgers[request.prefill or request.decode].computed(request.name)
        own = Work.of(request.num_prompt_tokens - request.num_cached_tokens, request.num_cached_tokens)
        if request.prefilled_here:
            self.predictor.observe_here(request.ahead, own, on_worker_s)
        else:
            self.predictor.observe_prefill(request.ahead, own, on_worker_s)
        self.changed()

    def _on_done(self, request: SimRequest) -> None:
        self.release(request)
        self.changed()
