"""The smallest pool of each kind that carries a load within its targets."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

from shared.errors import ConfigError
from shared.sizing.load import Hardware, Load, PoolFit
from shared.sizing.memory import Room, rooms
from shared.sizing.queueing import MAX_SERVERS, servers_needed, waits_longer
from shared.sizing.shapes import ModelShape
from shared.sizing.step_time import StepTimes, StepWork

_MOST_CHUNK = 1 << 20
VARIATION = 1.0
"""Squared coefficient of variation of the prompts' lengths, as of an exponential distribution."""


def prefill_pool(model: ModelShape, load: Load, hardware: Hardware) -> PoolFit:
    """The fewest GPUs whose queue is short enough for TTFT. Raises ConfigError where no worker is fast enough."""
    gpu, name = hardware.prefill_gpu, hardware.prefill_name
    fits: list[PoolFit] = []
    fastest_s = math.inf
    for room in rooms(model, gpu, name, load.context, replace(hardware, draft=None)):
        alone_s = hardware.step_times(model, gpu, room.spread).prompt_s(load.prompt_len)
        fastest_s = min(fastest_s, alone_s)
        if alone_s > load.ttft_s:
            continue
        offered = load.rate * alone_s
        if offered >= MAX_SERVERS:
            continue
        workers = servers_needed(offered, alone_s, load.ttft_s - alone_s, load.late_share, VARIATION)
        reason = f"{load.rate:.3g} req/s × {alone_s:.3g} s keep {offered:.2f} workers busy"
        fits.append(_fit("prefill", name, workers, room, 1, [reason], ttft_s=alone_s, busy=offered / workers))
    if not fits and fastest_s <= load.ttft_s:
        raise ConfigError(
            f"--rate {load.rate:g} keeps {load.rate * fastest_s:.0f} of the largest prefill workers busy, the most are "
            f"{MAX_SERVERS}",
            field="rate",
            limit=MAX_SERVERS,
            value=load.rate,
        )
    if not fits:
        raise ConfigError(
            f"a prompt of {load.prompt_len} tokens takes {fastest_s:.3g} s alone on the largest worker of "
            f"{_most_gpus(hardware)} × {name}, --ttft is {load.ttft_s:g} s: more workers do not help",
            field="ttft",
            limit=round(fastest_s, 3),
            value=load.ttft_s,
        )
    return min(fits, key=_size)


def decode_pool(model: ModelShape, load: Load, hardware: Hardware) -> PoolFit:
    """The fewest GPUs that hold all sequences within TPOT. Raises ConfigError where not even one is fast enough."""
    gpu, name = hardware.decode_gpu, hardware.decode_name
    fits: list[PoolFit] = []
    fastest_s = math.inf
    for room in rooms(model, gpu, name, load.context, hardware):
        times = hardware.step_times(model, gpu, room.spread)
        fastest_s = min(fastest_s, _step_s(times, load, 1))
        by_memory = room.kv_tokens // load.context
        by_time = batch = _largest_batch(times, load, by_memory)
        if batch < 1:
            continue
        workers = -(-load.concurrency // batch)
        per_worker = -(-load.concurrency // workers)
        reason = (
            f"TPOT allows {by_time} sequences a worker"
            if by_time < by_memory
            else f"memory holds {by_memory} sequences of {load.context} tokens a worker"
        )
        fits.append(_fit("decode", name, workers, room, per_worker, [reason], tpot_s=_step_s(times, load, per_worker)))
    if not fits:
        raise ConfigError(
            f"one sequence alone takes {fastest_s * 1e3:.3g} ms a token on the largest worker of "
            f"{_most_gpus(hardware)} × {name}, --tpot is {load.tpot_s * 1e3:g} ms: more workers do not help",
            field="tpot",
            limit=round(fastest_s, 4),
            value=load.tpot_s,
        )
    return min(fits, key=_size)


def collocated_pool(model: ModelShape, load: Load, hardware: Hardware, max_gpus: int) -> PoolFit | None:
    """The fewest GPUs of workers that do both, None where none up to `max_gpus` meet the targets.

    While a prompt is computed a step may take as long as TPOT allows: its chunk is the largest with which it does not
    take longer.
    """
    gpu, name = hardware.decode_gpu, hardware.decode_name
    fits: list[PoolFit] = []
    for room in rooms(model, gpu, name, load.context, hardware):
        times = hardware.step_times(model, gpu, room.spread)
        for workers in range(1, max_gpus // room.spread.num_ranks + 1):
            batch = -(-load.concurrency // workers)
            chunk = _chunk_beside(times, load, batch)
            if batch * load.context > room.kv_tokens or chunk < 1:
                continue
            alone_s = load.prompt_len / chunk * load.tpot_s
            late = waits_longer(workers, load.rate * alone_s, alone_s, load.ttft_s - alone_s, VARIATION)
            if alone_s <= load.ttft_s and late <= load.late_share:
                reason = f"a step of {load.tpot_s * 1e3:g} ms has room for a chunk of {chunk:,} tokens"
                busy = load.rate * alone_s / workers
                fits.append(
                    _fit(
                        "collocated",
                        name,
                        workers,
                        room,
                        batch,
                        [reason],
                        ttft_s=alone_s,
                        tpot_s=load.tpot_s,
                        busy=busy,
                    )
                )
                break
    return min(fits, key=_size, default=None)


def _most_gpus(hardware: Hardware) -> int:
    return hardware.max_tensor * hardware.max_pipeline


def _size(fit: PoolFit) -> tuple[int, int, int]:
    """The fewest GPUs, of workers as small as can be, with as few stages."""
    return fit.gpus, fit.gpus_each, fit.spread.pipeline


def _step_s(times: StepTimes, load: Load, batch: int) -> float:
    """A decode step of `batch` sequences, each half way through its answer."""
    return times.decode_step_s(batch, batch * (load.prompt_len + load.output_len // 2))


def _chunk_beside(times: StepTimes, load: Load, batch: int) -> int:
    """The most tokens of the load's prompts that a step of `batch` sequences computes within TPOT: their attention is
    that of tokens half way through a prompt. More than a prompt's where it could do several at once."""
    beside = StepWork(batch, batch * (load.prompt_len + load.output_len // 2))

    def seconds(chunk: int) -> float:
        return times.step_s(beside._replace(
            num_chunk_tokens=chunk, num_chunk_pairs=chunk * load.prompt_len // 2, num_chunks=1
        ))  # fmt: skip

    return bisect_right(range(1, _MOST_CHUNK), load.tpot_s, key=seconds)


def _largest_batch(times: StepTimes, load: Load, most: int) -> int:
    """The most sequences, up to `most`, whose step keeps TPOT; steps of more sequences are not shorter."""
    return bisect_right(range(1, most + 1), load.tpot_s, key=lambda batch: _step_s(times, load, batch))


def _fit(
    role: str,
    gpu: str,
    workers: int,
    room: Room,
    sequences: int,
    limits: list[str],
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    busy: float | None = None,
) -> PoolFit:
    return PoolFit(
        role, gpu, workers, room.spread, room.weight_bytes, room.kv_bytes_per_token, room.kv_tokens, sequences,
        ttft_s, tpot_s, busy, limits,
    )  # fmt: skip
