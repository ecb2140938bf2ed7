"""Picks routers for one request after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import psutil

from services.router.edge.scheduling import SchedulingHints, scheduling_hints
from services.router.edge.tenants.auth import ApiKeys
from services.router.picker.endpoints import EndpointWatch
from services.router.picker.router_order import Endpoint, Refusal, choose
from shared.address import Address
from shared.errors import InvalidRequest, Overloaded, TandemError, WorkerLost


class Picker:
    """Used from the event loop alone."""

    def __init__(
        self,
        watch: EndpointWatch,
        keys: ApiKeys,
        check_room: Callable[[SchedulingHints], None],
        own_port: Callable[[], int],
        most: int,
    ) -> None:
        """`check_room` is this router's own admission: it raises Overloaded where it would refuse a request with these
        hints however short; `own_port` is the port of this router's HTTP API. Does not own the watch."""
        self._watch = watch
        self._keys = keys
        self._check_room = check_room
        self._own_port = own_port
        self._most = most
        self._random = random.Random()
        self._own_hosts: frozenset[str] = frozenset()
        self._seen: list[Endpoint] = []

    def pick(self, headers: Mapping[str, str], subset: Collection[str] | None) -> list[str]:
        """ip:port of the routers for a request with these headers, best first; `subset` as in `choose`.

        Raises WorkerLost where none is ready, Overloaded where the request would be refused.
        """
        hints = self._hints(headers)
        session = f"{hints.tenant}/{hints.session}" if hints is not None and hints.session else ""
        overload: Overloaded | None = None
        endpoints = self._watch.endpoints
        own = self._own(endpoints)
        if own is not None and hints is not None:
            try:
                self._check_room(hints)
            except Overloaded as error:
                overload = error
                endpoints = [replace(each, full=True) if each is own else each for each in endpoints]
        chosen = choose(endpoints, subset, session, self._most, self._random)
        if chosen is Refusal.NOT_READY:
            raise WorkerLost("no router is ready" if subset is None else "no router of the subset is ready")
        if isinstance(chosen, Refusal):
            raise overload or Overloaded("the queues of all routers are full")
        chosen[0].load += 1  # until the next probe counts it
        return [each.address for each in chosen]

    def _hints(self, headers: Mapping[str, str]) -> SchedulingHints | None:
        """None for a request that its router will refuse: it says why better than a gateway."""
        try:
            return scheduling_hints(headers, self._keys.check(headers.get("authorization")))
        except TandemError:
            return None

    def _own(self, endpoints: list[Endpoint]) -> Endpoint | None:
        """This router's own endpoint among `endpoints`; None where it is not there."""
        if endpoints is not self._seen:  # a new look; the machine's addresses may have changed as well
            self._seen = endpoints
            self._own_hosts = frozenset(each.address for of in psutil.net_if_addrs().values() for each in of)
        port = self._own_port()
        for each in endpoints:
            address = Address.parse(each.address, "endpoint")
            if address.port == port and address.host in self._own_hosts:
                return each
        return None


def subset_of(value: object) -> list[str] | None:
    """The addresses of `x-gateway-destination-endpoint-subset`: a list of texts, or one text with commas; None where
    the key is not set. Raises InvalidRequest for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [str(each) for each in value]
    raise InvalidRequest("the subset hint must be a list of ip:port", field="x-gateway-destination-endpoint-subset")
