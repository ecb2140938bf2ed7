"""From logits to tokens: chosen on their device, fetched to the host, with the log-probabilities that are asked for.

Each row depends on its own logits and (seed, position) alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from shared.engine.plan import NoToken, PlannedSequence, SampledToken, SampleSpec, StepResult
from shared.engine.runner.device_link import DeviceLink
from shared.kernels.sampling.rows import SamplingRows
from shared.kernels.sampling_ops import SamplingOps

Send = Callable[[Tensor], Tensor]
"""Brings a host tensor to the device of the logits."""
MOST_CANDIDATES = 64
"""Above, all logits are sent: their ids would take as many bytes again."""
ALL_CANDIDATES = 0
"""The number of candidates that stands for every logit."""


@dataclass(frozen=True, eq=False)
class RowMasks:
    """The tokens that some rows may choose from."""

    rows: Sequence[int]
    words: Tensor  # [len(rows), num_words] int32 on the device, as `SamplingOps.mask_tokens` takes them
    faults: Mapping[int, str]  # rows whose structure failed, and why


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """Log-probabilities of the unmodified logits, for the rows that ask for some."""

    chosen: Tensor  # [num_asking] fp32, of the chosen token
    values: Tensor  # [num_asking, most] fp32, falling
    ids: Tensor  # [num_asking, most] int64

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, specs: Sequence[SampleSpec], send: Send) -> TopLogprobs | None:
        """From `logits` [num_rows, vocab_size] and the chosen `tokens` [num_rows]; None where no row asks for any."""
        asking = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None]
        if not asking:
            return None
        rows = send(torch.tensor(asking))
        logprobs = torch.log_softmax(logits.index_select(0, rows), dim=-1)
        most = min(max(specs[i].params.logprobs or 0 for i in asking), logits.shape[1])
        values, ids = logprobs.topk(most)
        chosen = logprobs.gather(1, tokens.index_select(0, rows).clamp(min=0)[:, None])[:, 0]
        return cls(chosen, values, ids)


def is_plain(spec: SampleSpec) -> bool:
    """True where the row's logits are sampled from as they are."""
    params = spec.params
    return not spec.banned_token_ids and not params.changes_logits and params.structured_output is None


def _takes_argmax(spec: SampleSpec) -> bool:
    """True where the row's token is the likeliest of the logits as they are, among those that its structure allows."""
    params = spec.params
    is_masked = params.structured_output is not None  # by a mask that leaves out what is banned
    return params.is_greedy and not params.has_penalties and not params.logit_bias and (is_masked or is_plain(spec))


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], ops: SamplingOps, send: Send, masks: RowMasks | None = None
) -> Tensor:
    """One token a row: [num_rows] int64 on the logits' device, -1 where nothing can be chosen.

    logits: [num_rows, vocab_size] float32, left unchanged; specs: as many as rows; masks: of the structured rows.
    """
    assert logits.dim() == 2, f"logits {tuple(logits.shape)}"
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.shape[0] == len(specs), f"{logits.shape[0]} rows for {len(specs)} specs"
    chosen = {row: row for row, spec in enumerate(specs) if _takes_argmax(spec)}
    tokens = ops.greedy_tokens(logits, *_masks_of(chosen, masks, send))
    if len(chosen) < len(specs):
        resample(tokens, logits, specs, [row for row in range(len(specs)) if row not in chosen], ops, send, masks)
    return tokens


def resample(
    tokens: Tensor,
    logits: Tensor,
    specs: Sequence[SampleSpec],
    rows: Sequence[int],
    ops: SamplingOps,
    send: Send,
    masks: RowMasks | None = None,
) -> None:
    """Choose again for some rows, in place, as their specs say in full.

    tokens: [num_rows] int64, -1 where a row's numbers broke; logits: [num_rows, vocab_size] float32, left unchanged;
    masks: of rows among these. The order is vLLM's: banned tokens and penalties, structure, temperature, min-p, top-k,
    top-p.
    """
    if not rows:
        return
    # The likeliest tokens need no sort, which is how torch samples.
    for greedy in (True, False):
        group = [row for row in rows if specs[row].params.is_greedy is greedy]
        if not group:
            continue
        index = send(torch.tensor(group))
        chosen_specs = [specs[row] for row in group]
        is_whole = len(group) == logits.shape[0] and all(is_plain(spec) for spec in chosen_specs)
        part = logits if is_whole else logits.index_select(0, index)
        for row, spec in zip(part, chosen_specs, strict=True):
            if not is_plain(spec):
                _modify(row, spec, send)
        words, places = _masks_of({row: place for place, row in enumerate(group)}, masks, send)
        if greedy:
            chosen = ops.greedy_tokens(part, words, places)
        else:
            if words is not None and places is not None:
                ops.mask_tokens(part, words, places)
            chosen = ops.sample_tokens(part, sampling_rows(chosen_specs, send))
        # A NaN is a fault also where it was a token that is not allowed.
        tokens.index_copy_(0, index, torch.where(tokens.index_select(0, index) < 0, -1, chosen))


def _masks_of(
    places: Mapping[int, int], masks: RowMasks | None, send: Send
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The masks of some rows, as the ops take them: their words, and their rows' places; None where none of these rows
    has one. `places` by row."""
    pairs = [] if masks is None else [(places[row], at) for at, row in enumerate(masks.rows) if row in places]
    if masks is None or not pairs:
        return None, None
    rows, at = (list(column) for column in zip(*pairs, strict=True))
    words = masks.words if len(at) == len(masks.rows) else masks.words.index_select(0, send(torch.tensor(at)))
    return words, send(torch.tensor(rows))


def sampling_rows(specs: Sequence[SampleSpec], send: Send) -> SamplingRows:
    """The specs as the sampling ops take them."""
    params = [spec.params for spec in specs]
    rows = SamplingRows.from_lists(
        [0.0 if p.is_greedy else p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.seed or 0 for p in params],
        [spec.position for spec in specs],
    )
    return SamplingRows(*(send(tensor) for tensor in vars(rows).values()))


def describe(
    tokens: Sequence[int],
    logprobs: TopLogprobs | None,
    specs: Sequence[SampleSpec],
    source: Callable[[int], str | None],
    faults: Mapping[int, str] = MappingProxyType({}),
) -> tuple[SampledToken | NoToken, ...]:
    """The result of a step from host values; `source(row)` says where a row's numbers broke, `faults` which rows'
    structures failed."""

    def none(row: int) -> NoToken:
        return NoToken(structure=faults[row]) if row in faults else NoToken(source(row))

    if logprobs is None:
        return tuple(
            SampledToken(token) if token >= 0 and row not in faults else none(row) for row, token in enumerate(tokens)
        )
    given = zip(*(part.tolist() for part in vars(logprobs).values()), strict=True)
    result: list[SampledToken | NoToken] = []
    for row, (token, spec) in enumerate(zip(tokens, specs, strict=True)):
        asked = spec.params.logprobs
        logprob, values, ids = next(given) if asked is not None else (None, [], [])
        if token < 0 or row in faults:
            result.append(none(row))
        else:
            result.append(SampledToken(token, logprob, tuple(zip(ids[:asked], values[:asked], strict=True))))
    return tuple(result)


def _modify(row: Tensor, spec: SampleSpec, send: Send) -> None:
    """Changes row [vocab_size] in place. Repetition (CTRL, Keskar et al. 2019) counts prompt and output, presence and
    frequency (OpenAI) the output alone. A bias is added behind them; what is banned stays banned."""
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = send(torch.tensor(sorted({*spec.prompt_token_ids, *spec.output_token_ids})))
        values = row.index_select(0, seen)
        penalty = params.repetition_penalty
        row.index_copy_(0, seen, torch.where(values > 0, values / penalty, values * penalty))
    if spec.output_token_ids and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        counted = Counter(spec.output_token_ids)
        counts = torch.tensor(list(counted.values()), dtype=row.dtype)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        row.index_add_(0, send(torch.tensor(list(counted))), send(penalties), alpha=-1)
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        row.index_add_(0, send(torch.tensor(token_ids)), send(torch.tensor(biases, dtype=row.dtype)))
    if params.structured_output is None:  # whose mask leaves them out
        banned = [*spec.banned_token_ids, *params.bad_token_ids(spec.output_token_ids)]
        if banned:
            row.index_fill_(0, send(torch.tensor(banned)), float("-inf"))


def num_candidates(items: Sequence[PlannedSequence]) -> int:
    """The number of a row's highest logits that its token can be chosen from, the most of all rows of a step;
    ALL_CANDIDATES where one of them needs every logit."""
    if any(item.targets for item in items):
        return ALL_CANDIDATES
    counts = [_candidates_of(item.sample) for item in items if item.sample is not None]
    most = max(counts, default=1)
    return ALL_CANDIDATES if ALL_CANDIDATES in counts or most > MOST_CANDIDATES else most


def _candidates_of(spec: SampleSpec) -> int:
    params = spec.params
    if not is_plain(spec) or params.logprobs is not None:
        return ALL_CANDIDATES
    return 1 if params.is_greedy else params.top_k


class PendingStep:
    """Holds host copies of what the step chose; they are on their way while the device computes."""

    def __init__(
        self,
        tokens: Tensor,  # [num_rows] int64 on the device
        logprobs: TopLogprobs | None,
        specs: Sequence[SampleSpec],
        link: DeviceLink,
        source: Callable[[int], str | None],
        faults: Mapping[int, str] = MappingProxyType({}),
        targets: PendingTargets | None = None,
        check: Callable[[], None] = lambda: None,
        pooled: Tensor | None = None,  # [num_pooling, hidden_size] fp32 on the device
    ) -> None:
        """Queues the copies. `source(row)` names the part of the model that gave a row its first NaN or infinity;
        called only for rows without a token. `faults`: the rows whose structure failed, and why; their tokens mean
        nothing. `check` is called when the step is done, and raises where its numbers may mean nothing."""
        self._specs = specs
        self._targets = targets
        self._source = source
        self._faults = faults
        self._tokens = link.fetch(tokens)
        self._pooled = None if pooled is None else link.fetch(pooled)
        self._logprobs = logprobs and TopLogprobs(*(link.fetch(part) for part in vars(logprobs).values()))
        self._wait = link.mark()
        self._check = check
        self._values: list[int] | None = None

    def result(self) -> StepResult:
        """Waits until the step is done."""
        sampled = describe(self.tokens(), self._logprobs, self._specs, self._source, self._faults)
        pooled = () if self._pooled is None else tuple(self._pooled.numpy())
        return StepResult(sampled, self._targets.result() if self._targets is not None else (), pooled)

    def tokens(self) -> list[int]:
        """The chosen tokens, -1 where there is none; waits until the step is done."""
        if self._values is None:
            try:
                self._wait()
            finally:
                self._check()  # raises with the cause, where the device reports an error
            self._values = self._tokens.tolist()
        return self._values


def logit_rows(items: Sequence[PlannedSequence]) -> list[int]:
    """Rows of the step's tokens whose logits are wanted, rising: those that tell of targets, and each sampling
    sequence's last."""
    rows: list[int] = []
    end = 0
    for item in items:
        begin, end = end, end + len(item.token_ids)
        if item.targets:
            rows += range(begin, begin + len(item.targets))
        if item.sample is not None:
            rows.append(end - 1)
    return rows


def split(logits: Tensor, items: Sequence[PlannedSequence], link: DeviceLink) -> tuple[Tensor, PendingTargets | None]:
    """Splits `logits` [num_logits, vocab_size] of `logit_rows` into those to sample from and the targets'
    log-probabilities."""
    if not any(item.targets for item in items):
        return logits, None
    is_sampled = [flag for item in items for flag in [False] * len(item.targets) + [True] * (item.sample is not None)]
    sampled = link.send(torch.tensor([row for row, flag in enumerate(is_sampled) if flag], dtype=torch.int64))
    others = link.send(torch.tensor([row for row, flag in enumerate(is_sampled) if not flag]))
    return logits.index_select(0, sampled), PendingTargets.of(logits.index_select(0, others), items, link)


@dataclass(frozen=True, eq=False, slots=True)
class PendingTargets:
    """Values on their way to the host."""

    items: tuple[PlannedSequence, ...]  # those with targets
    chosen: Tensor  # [num_targets] fp32
    values: Tensor  # [num_targets, most] fp32, falling
    ids: Tensor  # [num_targets, most] int64

    @classmethod
    def of(cls, logits: Tensor, items: Sequence[PlannedSequence], link: DeviceLink) -> PendingTargets:
        """The targets' log-probabilities, from `logits` [num_targets, vocab_size], a row for each target."""
        asking = tuple(item for item in items if item.targets)
        targets = link.send(torch.tensor([token_id for item in asking for token_id in item.targets]))
        logprobs = torch.log_softmax(logits, dim=-1)
        most = min(max(item.num_alternatives for item in asking), logits.shape[1])
        values, ids = logprobs.topk(most)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        return cls(asking, link.fetch(chosen), link.fetch(values), link.fetch(ids))

    def result(self) -> tuple[tuple[SampledToken, ...], ...]:
        """For each sequence with targets one entry a target; the step is done."""
        rows = zip(self.chosen.tolist(), self.values.tolist(), self.ids.tolist(), strict=True)
        return tuple(
            tuple(
                _entry(token_id, next(rows), item.num_alternatives)
                for token_id in item.targets
            )
            for item in self.items
        )  # fmt: skip


def _entry(token_id: int, row: tuple[float, list[float], list[int]], count: int) -> SampledToken:
    logprob, values, ids = row
    return SampledToken(token_id, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
