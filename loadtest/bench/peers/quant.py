"""`python -m loadtest.bench quant`: weights in fewer bits beside our own in 16, and beside peers of as many bits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

import torch

from loadtest.bench.peers.adapter import INT4, INT8, PLAIN, W4A8, W4A8_WIDE, W8A8, W8A8_WIDE
from loadtest.bench.peers.measure import OURS, Turns, compare, conclude
from loadtest.bench.peers.venvs import PEERS_IN_FEWER_BITS
from loadtest.rig.command_line import Option, Out, choice, names
from loadtest.rig.models import SHAPES, checkpoint
from loadtest.rig.results import Report

_FP8 = "fp8"
FORMS = (INT8, INT4, _FP8, W8A8, W4A8)
_OF_PEERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "openvino_genai": {
        INT8: (INT8, W8A8),
        INT4: (INT4, W4A8, W4A8_WIDE),
        W8A8: (W8A8, W8A8_WIDE),
        W4A8: (W4A8, W4A8_WIDE),
    },
    "llama_cpp_python": {INT8: (INT8,), INT4: (INT4,), W8A8: (INT8,), W4A8: (INT4,)},
}
"""Peer → our form → what it is measured in: the same arithmetic where it has that, and what it does by itself, which is
to round activations. None has fp8 on a CPU."""


def main(
    how: Turns,
    model: Annotated[str, Option(help=f"a shape: {', '.join(SHAPES)}")] = "1b",
    forms: Annotated[str, Option(help=f"forms of weights: {', '.join(FORMS)}")] = f"{INT8} {INT4}",
    peers: Annotated[str, Option(help="peers to measure")] = " ".join(PEERS_IN_FEWER_BITS),
    plain: Annotated[bool, Option(help="measure our weights in 16 bits too")] = True,
    out: Out = None,
) -> None:
    """Compare weights in fewer bits with our plain ones, and with those of peers of as many bits, in turns, by form."""
    choice(model, "model", SHAPES)
    wanted = names(forms, "forms", FORMS)
    beside = names(peers, "peers", PEERS_IN_FEWER_BITS)
    torch.set_num_threads(how.threads)
    folder = checkpoint(model)
    report, reasons = Report(out), dict[str, str]()
    for form in wanted:
        engines = [(OURS, form), *([(OURS, PLAIN)] if plain else [])]
        engines += [(peer, theirs) for peer in beside for theirs in _OF_PEERS[peer].get(form, ())]
        results, refused = asyncio.run(compare(model, folder, engines, how.cases(f", {form}"), how))
        report.add(results)
        reasons |= refused
    conclude(report, f"{model}, a form's rate over the peer's", reasons)
