"""Whom the worker that is chosen may ask for a prefix."""

from __future__ import annotations

from types import SimpleNamespace

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.prefix_lookup import MAX_PEERS, PrefixLookup, grouped_hits, hits_of
from services.router.dispatch.request import Request
from shared.engine.sampling_params import SamplingParams
from shared.identity import WorkerRole
from shared.kv.groups import KVGroups
from shared.kv.layout import BlockLayout, KVFormat
from shared.kv_index.holders import Holder, PrefixMatch, Tier

NAMES = [f"w{number}" for number in range(9)]


def lookup(held: dict[str, int]) -> PrefixLookup:
    """Against an index that says how many blocks each worker holds."""
    links = [
        SimpleNamespace(name=name, address=f"{name}:1", welcome=SimpleNamespace(worker=SimpleNamespace(incarnation=1)))
        for name in NAMES
    ]
    fleet = SimpleNamespace(
        layout=BlockLayout(1, 4, KVFormat("float32", 1, 8)),
        links=links,
        hash_root=lambda *_: bytes(16),
        model_fingerprint="m",
    )

    async def match(hashes, _traceparent="", *, scattered):
        blocks = [
            tuple(Holder(name, 1, WorkerRole.DECODE, Tier.DEVICE) for name in held if held[name] > index)
            for index in range(len(hashes))
        ]
        return PrefixMatch(tuple(blocks[: max(held.values())]))

    return PrefixLookup(SimpleNamespace(match=match), fleet)  # type: ignore[arg-type]


async def test_a_worker_is_told_of_those_that_hold_more_than_itself():
    hits = await lookup({"w1": 2, "w5": 7, "w3": 4}).hits(list(range(40)), "", 40)
    assert [(peer.name, peer.address, peer.num_blocks) for peer in hits.peers_of("w0")] == [
        ("w5", "w5:1", 7), ("w3", "w3:1", 4), ("w1", "w1:1", 2)
    ]  # fmt: skip
    assert [peer.name for peer in hits.peers_of("w3")] == ["w5"]
    assert hits.peers_of("w5") == []


async def test_of_a_prompt_whose_log_probabilities_are_asked_for_nothing_counts_as_cached():
    for asked, num_tokens in ((None, 28), (1, 0)):
        request = Request("r", tuple(range(40)), SamplingParams(max_tokens=8, seed=0, prompt_logprobs=asked))
        active = ActiveRequest(request, WriteCoalescer())
        active.begin_attempt()
        hits = await lookup({"w1": 7}).hits_for(active)
        assert hits.local.get("w1", 0) == num_tokens


async def test_of_many_that_hold_the_same_any_few_are_named():
    asked = lookup(dict.fromkeys(NAMES, 5))
    draws = [(await asked.hits(list(range(40)), "", 40)).peers for _ in range(50)]
    assert all(len(peers) == MAX_PEERS for peers in draws)
    assert {peer.name for peers in draws for peer in peers} == set(NAMES)
    assert draws[0][0].num_blocks == 5


def holder(name: str, tier: Tier = Tier.DEVICE, incarnation: int = 1) -> Holder:
    return Holder(name, incarnation, WorkerRole.DECODE, tier)


def test_a_hit_ends_at_the_first_block_that_the_place_has_not():
    match = PrefixMatch(
        (
            (holder("a"), holder("b"), holder("s", Tier.HOST)),
            (holder("a"), holder("s", Tier.DISK)),
            (holder("b"), holder("a")),
            (holder("a"), holder("s", Tier.HOST)),
        )
    )
    hits = hits_of(match, {("a", 1), ("b", 1)}, 4)
    assert (dict(hits.local), hits.peer) == ({"a": 16, "b": 4}, 16)
    assert (hits.store, hits.num_stored_blocks) == (8, 4)


def test_nothing_in_the_store_is_no_block():
    hits = hits_of(PrefixMatch(((holder("a"),),)), {("a", 1)}, 4)
    assert (hits.store, hits.num_stored_blocks) == (0, 0)


def test_what_a_dead_incarnation_held_is_no_hit():
    match = PrefixMatch(((holder("a"), holder("b", incarnation=2)),))
    assert dict(hits_of(match, {("a", 2), ("b", 2)}, 4).local) == {"b": 4}


def test_of_kv_groups_a_hit_is_the_longest_prefix_at_which_every_group_can_go_on():
    """A window of six tokens in blocks of four: what goes on behind block n needs the two blocks of the window before
    it."""
    groups = KVGroups(4, (None, 6))
    held = {"a": "FFFF --WW", "b": "FFFF -WW-", "c": "FFF- --WW", "s": "FFFF ---W"}
    blocks: list[list[Holder]] = [[] for _ in range(8)]
    for name, places in held.items():
        for group, row in enumerate(places.split()):
            for block, here in enumerate(row):
                if here != "-":
                    blocks[2 * block + group].append(holder(name, Tier.DISK if name == "s" else Tier.DEVICE))
    match = PrefixMatch(tuple(map(tuple, blocks)))
    hits = grouped_hits(match, {("a", 1), ("b", 1), ("c", 1)}, groups)
    assert dict(hits.local) == {"a": 16, "b": 12}
    assert (hits.store, hits.num_stored_blocks) == (0, 4)
