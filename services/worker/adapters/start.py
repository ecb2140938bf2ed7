"""A worker's adapters as its settings describe them."""

from __future__ import annotations

from services.worker.adapters.adapter_pool import AdapterPool
from services.worker.adapters.slots import SlotTable
from services.worker.host import EngineHost
from shared.engine.messages import PlaceAdapter
from shared.settings.named_folders import parse_adapters, parse_folders


async def start_adapters(host: EngineHost) -> AdapterPool | None:
    """The pool, with the adapters that are served from the start on; None where the settings ask for none. Raises
    ModelLoadError, ConfigError."""
    settings = host.settings
    if not settings.has_adapters:
        return None
    pool = AdapterPool(
        host.read_adapter,
        lambda slot, packed: host.engine.submit(PlaceAdapter(slot, packed)),
        SlotTable(settings.adapter_slots, settings.adapter_bytes),
        parse_folders(settings.adapter_folders),
        host_bytes=settings.adapter_host_bytes,
    )
    try:
        for name, folder in parse_adapters(settings.adapters).items():
            await pool.add(name, folder)
    except BaseException:
        await pool.close()
        raise
    return pool
