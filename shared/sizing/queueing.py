"""How many servers keep a queue short: Erlang's C formula and the tail of the wait behind it.

P(wait > t) ≈ C(c, a) · exp(−2 (c − a) t / ((1 + v) s)): c servers, a offered load, s mean service, v the squared
coefficient of variation of the service. Exact for v = 1 (M/M/c), the usual scaling of its rate for others.
"""

from __future__ import annotations

import math

MAX_SERVERS = 100_000
"""`servers_needed` looks no further."""


def erlang_c(servers: int, offered: float) -> float:
    """Share of arrivals that have to wait for one of `servers`; 1 where they cannot keep up.

    `offered` is arrivals per second times seconds of service each.
    """
    if offered <= 0:
        return 0.0
    if offered >= servers:
        return 1.0
    blocked = 1.0  # Erlang's B by its recursion over the number of servers
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def waits_longer(servers: int, offered: float, service_s: float, wait_s: float, variation: float = 1.0) -> float:
    """Share of arrivals that wait longer than `wait_s`; `variation` is v above, 0 where all take equally long."""
    share = erlang_c(servers, offered)
    if share in (0.0, 1.0) or service_s <= 0:
        return share
    return share * math.exp(-2 * (servers - offered) * max(0.0, wait_s) / ((1 + variation) * service_s))


def mean_wait_s(servers: int, offered: float, service_s: float, variation: float = 1.0) -> float:
    """Mean wait of all arrivals by the same scaling; infinite where the servers cannot keep up."""
    if offered >= servers:
        return math.inf
    return erlang_c(servers, offered) * service_s * (1 + variation) / (2 * (servers - offered))


def servers_needed(offered: float, service_s: float, wait_s: float, late_share: float, variation: float = 1.0) -> int:
    """The fewest servers at which at most `late_share` of the arrivals wait longer than `wait_s`; at least 1.

    Raises ValueError where `late_share` is not above 0, or `offered` is beyond MAX_SERVERS.
    """
    if late_share <= 0 or offered >= MAX_SERVERS:
        raise ValueError(f"late_share {late_share} must be above 0, offered {offered} below {MAX_SERVERS}")
    servers = max(1, math.floor(offered) + 1)
    while waits_longer(servers, offered, service_s, wait_s, variation) > late_share:
        servers += 1
    return servers
