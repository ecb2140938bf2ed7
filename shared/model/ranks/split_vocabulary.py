"""Embedding and output projection whose rows are split over ranks; where few logits matter, they are not gathered."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shared.collectives.interface import Collectives
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.model.layers.modules import DecoderModules
from shared.model.layers.scales import scaled_embedding, scaled_logits
from shared.model.ranks.shard import Shard

_NONE = -torch.inf


class SplitVocabulary:
    """One rank's rows of embedding and output projection."""

    def __init__(
        self, shard: Shard, modules: DecoderModules, stage: Collectives | None, head: Collectives | None
    ) -> None:
        """`stage` and `head` as in `RankLinks`."""
        self._shard = shard
        self._modules = modules
        self._stage = stage
        self._head = head

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 to [num_tokens, hidden_size]: each token's row, from the rank that has it."""
        own = self._shard.vocab
        is_own = (token_ids >= own.begin) & (token_ids < own.end)
        with in_this_thread(token_ids, token_ids.shape[0] * self._modules.embedding.shape[1]):
            x = functional.embedding(torch.where(is_own, token_ids - own.begin, 0), self._modules.embedding)
            if self._stage is not None:
                x.masked_fill_(~is_own[:, None], 0)
        if self._stage is not None:
            self._stage.all_reduce(x)
        with in_this_thread(x, x.numel()):
            return scaled_embedding(x, self._shard.config)

    def logits(self, normed: Tensor, num_candidates: int) -> Tensor:
        """[num_logits, hidden_size] to [num_logits, vocab_size] fp32 on the leader; an empty tensor elsewhere.

        `num_candidates`: as for `Decoder.forward`. Each rank then sends that many logits of a row, with ids.
        """
        own = None
        if self._shard.is_last:
            own = scaled_logits(self._modules.lm_head.forward(normed).float(), self._shard.config)
        if self._head is None:
            return normed if own is None else own
        message = self._candidates(own, normed.shape[0], num_candidates)
        gathered = self._head.gather(message)  # [ranks, …]
        if gathered is None:
            return normed.new_empty(0)
        if own is None:
            gathered = gathered[1:]  # a leader in another stage adds nothing
        return self._merge(gathered, num_candidates)

    def _candidates(self, own: Tensor | None, num_rows: int, count: int) -> Tensor:
        """[num_rows, most_vocab] fp32, or with a count [2, num_rows, count]: logits, and the bits of their ids."""
        device = self._modules.embedding.device
        if count == 0:
            return _padded(own, num_rows, self._shard.most_vocab, device)
        if own is None:
            return torch.zeros((2, num_rows, count), device=device)
        values, ids = _highest(own, min(count, own.shape[1]))
        message = torch.full((2, num_rows, count), _NONE, device=device)
        message[1] = 0
        message[0, :, : values.shape[1]] = values
        message[1, :, : ids.shape[1]] = (ids + self._shard.vocab.begin).int().view(torch.float32)
        return message

    def _merge(self, gathered: Tensor, count: int) -> Tensor:
        vocab_size = self._shard.config.vocab_size
        if count == 0:
            spans = [Shard(self._shard.config, self._shard.degrees, part).vocab for part in range(len(gathered))]
            return torch.cat([rows[:, : span.length] for rows, span in zip(gathered, spans, strict=True)], dim=1)
        num_rows, shape = gathered.shape[2], (gathered.shape[2], gathered.shape[0] * count)
        values = gathered[:, 0].transpose(0, 1).reshape(shape)
        ids = gathered[:, 1].transpose(0, 1).reshape(shape).view(torch.int32).long()
        begins = torch.arange(num_rows, device=values.device)[:, None] * vocab_size
        places = begins + ids.clamp(0, vocab_size - 1)  # where a rank was lost, any bits
        # A part of few rows fills up with what must not be written: that goes behind the last row. To leave it out
        # would take its number, for which the host would wait for the device.
        places = torch.where(values == _NONE, num_rows * vocab_size, places)
        logits = torch.full((num_rows * vocab_size + 1,), _NONE, device=values.device)
        logits.scatter_(0, places.flatten(), values.flatten())
        return logits[:-1].view(num_rows, vocab_size)


def _padded(own: Tensor | None, num_rows: int, width: int, device: torch.device) -> Tensor:
    padded = torch.zeros((num_rows, width), device=device)
    if own is not None:
        padded[:, : own.shape[1]] = own
    return padded


def _highest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, columns) [num_rows, count]; of equal ones the first column, where only one is asked for."""
    if count > 1:
        values, columns = logits.topk(count)
        return values, columns
    columns = logits.argmax(dim=1, keepdim=True)
    return logits.gather(1, columns), columns
