"""Which split of the workers between prompts and answers would have served the last requests better, by the model that
mode auto decides by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from services.router.dispatch.record import RequestRecord
from services.router.placement.demand import Mix
from services.router.placement.split import FEWEST_ARRIVALS
from services.router.placement.views import Work, WorkerView
from services.router.placement.what_if import Targets, headrooms
from services.router.views.attribution.verdict import Outcome, Verdict, outcome
from shared.kv.groups import KVGroups
from shared.settings.common import Mode
from shared.sizing.step_time import StepTimes

WORTH = 1.1
"""Another split is named where its headroom is this many times that of the present one: the model is no more exact."""


@dataclass(frozen=True, slots=True)
class UsedFleet:
    """The workers of one model as they are used now."""

    mode: Mode
    prefills: Sequence[WorkerView]
    """Workers with the prefill role; empty unless the mode is disaggregated."""
    decodes: Sequence[WorkerView]
    """Workers with the decode role; in modes other than disaggregated, all workers."""
    num_decoding: int
    """Workers that decode, of all."""
    groups: KVGroups


@dataclass(frozen=True, slots=True)
class SplitVerdict:
    """The split that there was, and the best one. A headroom is how many times the window's demand could be served."""

    num_workers: int
    num_decoding: int
    headroom: float
    best_decoding: int
    best_headroom: float
    is_elastic: bool
    """The best one needs workers that compute prompts beside answers."""

    @property
    def gain(self) -> float:
        """The factor by which the best split would have served more."""
        return self.best_headroom / max(self.headroom, 1e-9)

    @property
    def is_worth_it(self) -> bool:
        """Whether the best one would have served clearly more."""
        return self.gain > WORTH


def mix_of(judged: Sequence[tuple[RequestRecord, Verdict]], window_s: float, now_s: float) -> Mix | None:
    """What the requests asked for, refused ones included; None where too few tell."""
    records = [record for record, verdict in judged if verdict.counts]
    finished = [record for record in records if outcome(record) is Outcome.FINISHED]
    if len(records) < FEWEST_ARRIVALS or not finished:
        return None
    seen_s = min(window_s, max(1.0, now_s - min(record.ask.arrived_at for record in records)))
    prompt = fmean(record.ask.num_prompt_tokens for record in records)
    cached = min(prompt - 1, fmean(record.num_cached_tokens for record in finished))
    return Mix(
        len(records) / seen_s,
        Work.of(max(1, round(prompt - cached)), max(0, round(cached))),
        prompt,
        max(1.0, fmean(record.num_output_tokens for record in finished)),
    )


def judge_split(fleet: UsedFleet, mix: Mix, targets: Targets) -> SplitVerdict | None:
    """None where nothing is known: steps are not known, or no target for TPOT is set."""
    workers = _one_kind(fleet) if fleet.mode == "disaggregated" else list(fleet.decodes)
    if not all(view.times is not None for view in workers):
        return None
    elastic = headrooms(workers, mix, targets, fleet.groups, present=fleet.num_decoding)
    apart = headrooms(workers, mix, targets, fleet.groups, apart=True, present=fleet.num_decoding)
    present = (apart if fleet.mode == "disaggregated" else elastic).get(fleet.num_decoding)
    if present is None:
        return None
    best, is_elastic = max(elastic, key=elastic.__getitem__), True
    apart_best = max(apart, key=apart.__getitem__)
    if fleet.mode == "disaggregated" and elastic[best] <= WORTH * apart[apart_best]:
        best, is_elastic = apart_best, False
    most = elastic[best] if is_elastic else apart[best]
    return SplitVerdict(len(workers), fleet.num_decoding, present, best, most, is_elastic)


def _one_kind(fleet: UsedFleet) -> list[WorkerView]:
    """Both pools' workers as if each could do the other's work. A prefill worker's steps tell of prompts alone, and a
    decode worker's of answers: each has what both have learnt, which holds for equal hardware. Empty where one
    of the two is not known."""
    prompts = [view.times for view in fleet.prefills if view.times is not None]
    answers = [view.times for view in fleet.decodes if view.times is not None]
    if not prompts or not answers:
        return []
    times = joined(prompts[len(prompts) // 2], answers[len(answers) // 2])
    decode = fleet.decodes[0]
    return [
        replace(
            view,
            times=times,
            num_total_blocks=decode.num_total_blocks,
            max_num_seqs=decode.max_num_seqs,
            max_step_tokens=fleet.prefills[0].max_step_tokens,
        )
        for view in (*fleet.prefills, *fleet.decodes)
    ]


def joined(prompts: StepTimes, answers: StepTimes) -> StepTimes:
    """The steps of a worker that does both, from one that has computed prompts and one that has decoded."""
    return replace(
        answers, token_s=prompts.token_s, attention_s=prompts.attention_s, overlap=min(prompts.overlap, answers.overlap)
    )


def targets_of(ttft_s: float, tpot_s: float) -> Targets:
    """The targets of a router's settings, in which 0 is none."""
    return Targets(tpot_s or math.inf, ttft_s or math.inf)
