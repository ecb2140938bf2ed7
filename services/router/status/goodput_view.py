"""What became of the router's requests, over all its models: windows of ended ones, and running ones by state."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.router.dispatch.states import RequestState
from services.router.views.attribution.window import DEFAULT_WINDOW_S, MAX_WINDOW_S, Percentiles, Window, summarize
from shared.errors import InvalidRequest
from shared.rpc.pb.tandem.v1 import inference_pb2

if TYPE_CHECKING:
    from services.router.served_model import ServedModel

KEPT_S = 0.5
"""A window is made at most this often, however many ask."""
_KEPT_WINDOWS = 8


class GoodputView:
    """Reads the records that ended, and those of the dispatchers; on the event loop alone."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        self._windows: dict[float, tuple[float, inference_pb2.GoodputWindow]] = {}

    def window(self, window_s: float = 0.0) -> inference_pb2.GoodputWindow:
        """The last `window_s` seconds, 0 = 60. Raises InvalidRequest (`window_s`)."""
        asked = window_s or DEFAULT_WINDOW_S
        if not (math.isfinite(asked) and 1.0 <= asked <= MAX_WINDOW_S):
            raise InvalidRequest(
                f"window_s must be 1 to {MAX_WINDOW_S:g}, got {window_s:g}",
                field="window_s", limit=MAX_WINDOW_S, value=window_s,
            )  # fmt: skip
        now_s = time.perf_counter()
        made_s, kept = self._windows.get(asked, (-math.inf, None))
        if kept is not None and now_s - made_s < KEPT_S:
            return kept
        if len(self._windows) >= _KEPT_WINDOWS:
            self._windows.clear()
        rings = [model.requests.ended for model in self._models]
        found = [entry for ring in rings for entry in ring.within(asked, now_s)]
        reach_s = min(ring.reach_s(asked, now_s) for ring in rings)
        made = _to_proto(summarize(found, rings[0].targets, reach_s))
        self._windows[asked] = (now_s, made)
        return made

    def flow(self) -> inference_pb2.RequestFlow:
        """Requests by what happens to them now."""
        now = Counter(active.state for model in self._models for active in model.dispatcher.running)
        return inference_pb2.RequestFlow(
            num_queued=now[RequestState.QUEUED],
            num_reserved=now[RequestState.RESERVED] + now[RequestState.REASSIGNING],
            num_prefilling=now[RequestState.PREFILLING],
            num_shipping=now[RequestState.SHIPPING] + now[RequestState.RESUMING],
            num_decoding=now[RequestState.DECODING],
        )


def _to_proto(window: Window) -> inference_pb2.GoodputWindow:
    return inference_pb2.GoodputWindow(
        window_s=window.window_s,
        num_requests=window.num_requests,
        num_good=window.num_good,
        num_refused=window.num_refused,
        num_failed=window.num_failed,
        goodput=window.goodput,
        ttft_target_ms=window.targets.ttft_s * 1e3,
        tpot_target_ms=window.targets.tpot_s * 1e3,
        ttft=_percentiles(window.ttft),
        tpot=_percentiles(window.tpot),
        num_prompt_tokens=window.num_prompt_tokens,
        num_cached_tokens=window.num_cached_tokens,
        num_output_tokens=window.num_output_tokens,
        binding=window.binding.value if window.binding is not None else "",
        causes=[
            inference_pb2.CauseShare(
                cause=share.cause.value,
                num_lost=share.num_lost,
                lost_share=share.lost_share,
                time_share=share.time_share,
            )
            for share in window.causes
        ],
    )


def _percentiles(values: Percentiles) -> inference_pb2.Percentiles:
    return inference_pb2.Percentiles(p50_ms=values.p50 * 1e3, p95_ms=values.p95 * 1e3, p99_ms=values.p99 * 1e3)
