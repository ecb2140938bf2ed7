"""From logits to tokens: chosen on their device, fetched to the host, with the log-probabilities that are asked for.

Each row depends on its own logits, its sequence's tokens and (seed, position) alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from shared.engine.plan import NoToken, PlannedSequence, SampledToken, SampleSpec, StepResult
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.guessed_rows import NO_GUESS, GuessedRows
from shared.engine.runner.histories import SequenceHistories
from shared.engine.runner.logprobs import PendingTargets, TopLogprobs
from shared.engine.sampling_params import SamplingParams
from shared.kernels.sampling.history import Penalties
from shared.kernels.sampling.rows import SamplingRows
from shared.kernels.sampling_ops import SamplingOps

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


def is_plain(spec: SampleSpec) -> bool:
    """True where the row's logits are sampled from as they are."""
    params = spec.params
    return not spec.banned_token_ids and not params.changes_logits and params.structured_output is None


class Sampler:
    """Chooses the tokens of one runner's steps.

    What it needs of the settings is on the device from step to step, as long as the same sequences are sampled for with
    the same settings.
    """

    def __init__(self, ops: SamplingOps, link: DeviceLink, max_num_seqs: int) -> None:
        """Most sequences of a step."""
        self._ops = ops
        self._link = link
        self._histories = SequenceHistories(max_num_seqs, link)
        self._key: object = None  # ids, settings and banned tokens of the rows, and whether they are all
        self._rows = _Rows([], [], [], self._histories, 0, link)  # what follows from the key

    def sample(
        self,
        logits: Tensor,
        names: Sequence[str],
        specs: Sequence[SampleSpec],
        masks: RowMasks | None = None,
        guesses: Sequence[int] | None = None,
    ) -> Tensor:
        """One token a row: [num_rows] int64 on the logits' device, -1 where nothing can be chosen.

        logits: [num_rows, vocab_size] float32, changed unless a row asks for log-probabilities; names, specs: the
        sequences' ids and specs, as many as rows, those of a sequence side by side; masks: of the structured rows;
        guesses: of each row the guess right before it, as in `guesses_before`, None where there are none. The order is
        vLLM's: penalties, biases and banned tokens, structure, temperature, min-p, top-k, top-p.
        """
        assert logits.dim() == 2, f"logits {tuple(logits.shape)}"
        assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
        assert logits.shape[0] == len(specs), f"{logits.shape[0]} rows for {len(specs)} specs"
        rows = self._rows_of(names, specs, logits.shape[1], are_all=True)
        return self._choose(logits, rows, specs, masks, guesses, None)

    def resample(
        self,
        tokens: Tensor,
        logits: Tensor,
        names: Sequence[str],
        specs: Sequence[SampleSpec],
        masks: RowMasks | None = None,
        guesses: Sequence[int] | None = None,
    ) -> None:
        """Choose again, in place, for the rows whose logits are not sampled from as they are; the other arguments are
        those of `sample`. tokens: [num_rows] int64, of the logits as they are."""
        rows = self._rows_of(names, specs, logits.shape[1], are_all=False)
        if not rows.chosen:
            return
        if rows.places is None:
            tokens.copy_(self._choose(logits, rows, specs, masks, guesses, tokens))
            return
        if masks is not None:  # they are of these rows alone
            place = {row: at for at, row in enumerate(rows.chosen)}
            masks = RowMasks([place[row] for row in masks.rows], masks.words, masks.faults)
        part, before = logits.index_select(0, rows.places), tokens.index_select(0, rows.places)
        if guesses is not None:
            guesses = [guesses[at] for at in rows.chosen]
        chosen = self._choose(part, rows, [specs[at] for at in rows.chosen], masks, guesses, before)
        tokens.index_copy_(0, rows.places, chosen)

    def _rows_of(self, names: Sequence[str], specs: Sequence[SampleSpec], vocab_size: int, *, are_all: bool) -> _Rows:
        """All rows, or those that are not plain: of the step before, where it had the same sequences and settings."""
        key = names, [spec.params for spec in specs], [spec.banned_token_ids for spec in specs], are_all
        # What a plan gives of a sequence is placed once.
        gives = any(spec.prompt_token_ids or spec.output_token_ids for spec in specs)
        if gives or key != self._key:
            chosen = [at for at, spec in enumerate(specs) if are_all or not is_plain(spec)]
            self._rows = _Rows(chosen, names, specs, self._histories, vocab_size, self._link)
            self._key = key
        return self._rows

    def _choose(
        self,
        logits: Tensor,
        rows: _Rows,
        specs: Sequence[SampleSpec],
        masks: RowMasks | None,
        guesses: Sequence[int] | None,
        sound: Tensor | None,
    ) -> Tensor:
        """[num_rows] int64. sound: [num_rows] int64, below 0 where a row's numbers broke, if that is known already."""
        ops = self._ops
        if rows.changes and rows.asks_logprobs:
            logits = logits.clone()
        guessed = None if guesses is None else GuessedRows.of(rows.slots, guesses, self._link)
        if rows.penalties is not None and guessed is not None:
            guessed.penalize(ops, logits, self._histories.tokens(logits.shape[1]), rows.penalties)
        elif rows.penalties is not None:
            ops.penalize(logits, self._histories.tokens(logits.shape[1]), rows.penalties)
        if rows.edits is not None:
            logits.view(-1).index_add_(0, *rows.edits)
        if rows.rules is not None:
            rows.rules.apply(logits, self._histories, guessed)
        words = places = None
        if masks is not None and masks.rows:
            words, places = masks.words, self._link.send(torch.tensor(masks.rows))
        if rows.ways is None:
            tokens = ops.greedy_tokens(logits, words, places)
        else:
            positions = self._link.send(torch.tensor([spec.position for spec in specs]))
            ways = replace(rows.ways, positions=positions)
            if words is None or places is None:
                tokens = ops.sample_tokens(logits, ways)
            else:
                # A NaN is a fault also where it was a token that is not allowed.
                sound = ops.greedy_tokens(logits) if sound is None else sound
                ops.mask_tokens(logits, words, places)
                tokens = torch.where(sound < 0, -1, ops.sample_tokens(logits, ways))
        if rows.penalties is not None and guessed is not None:
            guessed.count(ops, self._histories.tokens(logits.shape[1]), rows.penalties, tokens)
        elif rows.penalties is not None:
            ops.count_tokens(self._histories.tokens(logits.shape[1]), rows.penalties.slots, tokens)
        if rows.rules is not None and guessed is not None:
            self._histories.follow_tails(guessed.slots, *guessed.chosen(tokens))
        elif rows.rules is not None:
            rows.rules.follow(tokens, self._histories)
        return tokens


class _Rows:
    """What the rows of a step's logits have of their settings, on the device."""

    def __init__(
        self,
        chosen: list[int],
        names: Sequence[str],
        specs: Sequence[SampleSpec],
        histories: SequenceHistories,
        vocab_size: int,
        link: DeviceLink,
    ) -> None:
        """Settings of the rows `chosen` alone. The sequences with penalties keep the slots that they had in the step
        before."""
        self.chosen = chosen
        self.places: Tensor | None = None  # [num_rows] int64, those of `chosen`; None: all rows are
        if len(chosen) < len(specs):
            self.places = link.send(torch.tensor(chosen, dtype=torch.int64))
            names, specs = [names[at] for at in chosen], [specs[at] for at in chosen]
        params = [spec.params for spec in specs]
        self.asks_logprobs = any(p.logprobs is not None for p in params)
        self.ways: SamplingRows | None = None  # but for the positions; None: all rows are greedy
        if not all(p.is_greedy for p in params):
            ways = SamplingRows.from_lists(
                [0.0 if p.is_greedy else p.temperature for p in params],
                [p.top_k for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                [p.seed or 0 for p in params],
                [0] * len(params),
            )
            self.ways = SamplingRows(*(link.send(part) for part in vars(ways).values()))
        followed = [at for at, p in enumerate(params) if p.has_penalties]
        firsts = {names[at]: specs[at] for at in reversed(followed)}  # rows behind guesses give no tokens
        slot_of = dict(zip(firsts, histories.place(list(firsts), list(firsts.values()), vocab_size), strict=True))
        self.slots = slots = {at: slot_of[names[at]] for at in followed}
        self.penalties = _penalties(params, slots, link)
        self.edits = _edits(specs, vocab_size, link)
        self.rules = _Rules.of(params, slots, vocab_size, link)
        is_structured = any(p.structured_output is not None for p in params)
        self.changes = bool(self.penalties or self.edits or self.rules) or (is_structured and self.ways is not None)


def _penalties(params: Sequence[SamplingParams], slots: Mapping[int, int], link: DeviceLink) -> Penalties | None:
    if not any(params[at].counts_tokens for at in slots):
        return None
    rows = [slots[at] if p.counts_tokens else -1 for at, p in enumerate(params)]
    factors = ([getattr(p, f"{name}_penalty") for p in params] for name in ("repetition", "presence", "frequency"))
    return Penalties(link.send(torch.tensor(rows)), *(link.send(torch.tensor(f, dtype=torch.float32)) for f in factors))


def _edits(specs: Sequence[SampleSpec], vocab_size: int, link: DeviceLink) -> tuple[Tensor, Tensor] | None:
    """(places in the flat logits [n] int64, what is added there [n] fp32): biases, and -inf where a token is banned."""
    places: list[int] = []
    added: list[float] = []
    for row, spec in enumerate(specs):
        params, begin = spec.params, row * vocab_size
        for token_id, bias in params.logit_bias:
            places.append(begin + token_id)
            added.append(bias)
        if params.structured_output is not None:
            continue  # its mask leaves out what is banned
        for token_id in (*spec.banned_token_ids, *(bad[0] for bad in params.bad_sequences if len(bad) == 1)):
            places.append(begin + token_id)
            added.append(-math.inf)
    if not places:
        return None
    return link.send(torch.tensor(places)), link.send(torch.tensor(added, dtype=torch.float32))


@dataclass(frozen=True, eq=False)
class _Rules:
    """Bad sequences of several tokens: the last of each is banned where an output ends with those before it."""

    rows: Tensor  # [num_followed] int64, rows whose newest tokens are kept
    slots: Tensor  # [num_followed] int64, theirs
    rule_slots: Tensor  # [num_rules] int64
    rule_rows: Tensor  # [num_rules] int64
    beginnings: Tensor  # [num_rules, longest] int64, -1 in front of the shorter ones
    places: Tensor  # [num_rules] int64 in the flat logits, of the last tokens

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], slots: Mapping[int, int], vocab_size: int, link: DeviceLink
    ) -> _Rules | None:
        """None where no row has any."""
        rules = [
            (at, bad)
            for at in slots
            if params[at].structured_output is None
            for bad in params[at].bad_sequences
            if len(bad) > 1
        ]
        if not rules:
            return None
        longest = max(len(bad) for _, bad in rules) - 1
        rows = sorted({at for at, _ in rules})
        columns = (
            rows,
            [slots[at] for at in rows],
            [slots[at] for at, _ in rules],
            [at for at, _ in rules],
            [[-1] * (longest + 1 - len(bad)) + list(bad[:-1]) for _, bad in rules],
            [at * vocab_size + bad[-1] for at, bad in rules],
        )
        return cls(*(link.send(torch.tensor(column)) for column in columns))

    def apply(self, logits: Tensor, histories: SequenceHistories, guessed: GuessedRows | None) -> None:
        """Bans what would complete one, of the tokens with the guesses before each row."""
        guesses, counts = (None, None) if guessed is None else guessed.before(self.rule_rows)
        found = histories.matches(self.rule_slots, self.beginnings, guesses, counts)
        # Several rules may end with one token, so what is written must not depend on which comes last.
        logits.view(-1).index_add_(0, self.places, torch.where(found, -math.inf, 0.0))

    def follow(self, tokens: Tensor, histories: SequenceHistories) -> None:
        """Appends `tokens` [num_rows] to the outputs."""
        histories.follow_tails(self.slots, tokens.index_select(0, self.rows)[:, None])


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
            [
                tuple.__new__(SampledToken, (token, None, (), b"")) if token >= 0 and row not in faults else none(row)
                for row, token in enumerate(tokens)
            ]
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


def guesses_before(items: Sequence[PlannedSequence]) -> list[int] | None:
    """For each row that a token is chosen for the guess right before it, NO_GUESS behind a sequence's newest token;
    None where a step has no guesses."""
    if max([len(item.samples) for item in items], default=0) < 2:
        return None
    return [token_id for item in items if item.samples for token_id in (NO_GUESS, *item.guesses)]


def num_candidates(items: Sequence[PlannedSequence]) -> int:
    """The number of a row's highest logits that its token can be chosen from, the most of all rows of a step;
    ALL_CANDIDATES where one of them needs every logit."""
    if any(item.targets for item in items):
        return ALL_CANDIDATES
    counts = [_candidates_of(spec) for item in items for spec in item.samples]
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
