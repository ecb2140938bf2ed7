"""`tandem explain`: why a request went to the workers that served it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from shared.rpc.pb.tandem.v1 import inference_pb2
from tandem import AsyncTandemClient, NotFound, TandemError
from tandem.failures import RouterLost
from tandem_cli.console import console_of, json_of, table_of
from tandem_cli.options import LOCAL, Connection

_PIPED_WIDTH = 200
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
_WHY = {
    "hand_off": "prefilled by the prefill pool",
    "same_worker": "prefilled where it decodes: no pair of workers was predicted to serve it better",
    "collocated": "prefilled where it decodes: the cluster is collocated",
    "short_suffix": "prefilled where it decodes: the uncached suffix is short",
    "pool_slower": "prefilled where it decodes: the prefill pool was predicted to be slower",
    "no_prefill": "prefilled where it decodes: no prefill worker was there",
}

_CAUSES = {
    "drain": "its worker drains",
    "preference": "its worker is wanted for prompts",
    "rescue": "its worker was too slow",
}
_OUTCOMES = {
    "": "under way",
    "moved": "moved",
    "carried": "went on there, for the old worker was lost",
    "stayed": "stayed",
    "ended": "ended first",
}


def explain(
    request_id: Annotated[str, typer.Argument(help="The answer's request id, or its `id`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's full reply as JSON.")] = False,
    connection: Connection = LOCAL,
) -> None:
    """Show the candidates and scores of a request's placement."""
    routers = [replace(connection, target=target) for target in connection.target.split(",")]
    found = asyncio.run(explanation_of([router.open(AsyncTandemClient) for router in routers], request_id))
    if as_json:
        print(json_of(found))
        return
    console = console_of(_PIPED_WIDTH)
    for decision in found.attempts:
        console.print(summary_line(decision), markup=False)
        for role, chosen, candidates in (
            ("decode", decision.decode_worker, decision.decode_candidates),
            ("prefill", decision.prefill_worker, decision.prefill_candidates),
        ):
            if candidates:
                console.print()
                console.print(candidate_table(role, chosen, candidates))
        if decision.pairs:
            console.print()
            console.print(pair_table(decision.pairs))
    for move in found.moves:
        console.print(move_line(move), markup=False)


def move_line(move: inference_pb2.AnswerMove) -> str:
    """One move of the running answer on one line."""
    outcome = _OUTCOMES.get(move.outcome, move.outcome)
    why = f" ({move.error})" if move.error else ""
    return (
        f"move after {move.at_ms:.0f} ms: {move.source} -> {move.target}, {_CAUSES.get(move.cause, move.cause)}; "
        f"{outcome}{why}" + (f" after {move.took_ms:.1f} ms" if move.outcome else "")
    )


def summary_line(decision: inference_pb2.PlacementDecision) -> str:
    """One attempt on one line."""
    workers = " -> ".join(filter(None, (decision.prefill_worker, decision.decode_worker)))
    predicted = (
        f", first token predicted in {decision.predicted_ttft_ms:.1f} ms"
        if decision.HasField("predicted_ttft_ms")
        else ""
    )
    # Where pairs are compared there is no prefill pool.
    apart = decision.route == "hand_off" and len(decision.pairs) > 0
    why = "prefilled by another worker" if apart else _WHY.get(decision.route, decision.route)
    return (
        f"attempt {decision.attempt}: {workers}, {why}; "
        f"{decision.num_prompt_tokens} prompt tokens, {decision.queue_ms:.1f} ms in the queue{predicted}"
    )


def candidate_table(role: str, chosen: str, candidates: Sequence[inference_pb2.PlacementCandidate]) -> Table:
    """The eligible workers, best first; the chosen one is marked."""
    scorers = [part.scorer for part in candidates[0].parts]
    rows = [
        (
            f"{candidate.worker} *" if candidate.worker == chosen else candidate.worker,
            f"{candidate.score:.3f}",
            *(f"{part.score:.3f}" for part in candidate.parts),
            f"{candidate.num_hit_tokens}",
            f"{candidate.num_queued_tokens}",
            f"{candidate.num_free_blocks}",
            f"{candidate.num_requests}",
        )
        for candidate in candidates
    ]
    name = f"{role} worker"
    headers = (name, "score", *scorers, "hit tokens", "queued", "free blocks", "requests")
    return table_of(headers, rows, text=(name,))


def pair_table(pairs: Sequence[inference_pb2.PlacementPair]) -> Table:
    """The pairs that were compared, the one taken first; "here": the prompt is computed where its answer runs."""
    rows = [
        (
            f"{pair.decode_worker} *" if place == 0 else pair.decode_worker,
            "here" if pair.prefill_worker == pair.decode_worker else pair.prefill_worker,
            f"{pair.ttft_ms:.1f} ms" if pair.HasField("ttft_ms") else "-",
            f"{pair.tpot_ms:.1f} ms" if pair.HasField("tpot_ms") else "-",
            f"{100 * pair.in_time:.0f} %",
            f"{pair.score:.3f}",
        )
        for place, pair in enumerate(pairs)
    ]
    text = ("decode worker", "prefill worker")
    return table_of((*text, "TTFT", "TPOT", "in time", "score"), rows, text=text)


async def explanation_of(routers: Sequence[AsyncTandemClient], request_id: str) -> inference_pb2.Explanation:
    """What one of the routers, a client each, remembers of a request, by its id or an answer's. Raises NotFound where
    none does, RouterLost where one that might does not answer."""
    failure: TandemError | None = None
    for router in routers:
        async with router:
            for name in dict.fromkeys((request_id, request_id_of(request_id))):
                try:
                    return await router.explain(name)
                except NotFound as error:
                    failure = failure or error
                except RouterLost as error:
                    failure = error
                    break
    assert failure is not None
    raise failure


def request_id_of(answer_id: str) -> str:
    """The request id in the `id` of an answer over HTTP, such as `chatcmpl-…`; other texts as they are."""
    return next((answer_id.removeprefix(each) for each in _ID_PREFIXES if answer_id.startswith(each)), answer_id)
