"""Whether a request's structure compiles: found out here, before any worker has the request."""

from __future__ import annotations

import asyncio

from services.router.edge.settings import StructureSettings
from shared.errors import InvalidRequest, Overloaded
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import StructuredOutput


class StructureCheck:
    """Compiles each structure once, beside the event loop. Any number at once."""

    def __init__(self, compiler: StructureCompiler, settings: StructureSettings) -> None:
        self._compiler = compiler
        self._settings = settings

    async def check(self, structure: StructuredOutput | None) -> None:
        """Raises InvalidRequest naming the request's field, with the limit or llguidance's reason; Overloaded where too
        many wait to be compiled, or this one takes too long: what one may cost is limited, so that the machine is busy,
        and a later request finds it compiled."""
        if structure is None:
            return
        field, limits = structure.source or structure.kind.value, self._settings
        if structure.num_bytes > limits.max_bytes:
            raise InvalidRequest(
                f"{field} must take at most {limits.max_bytes} bytes, got {structure.num_bytes}",
                field=field,
                limit=limits.max_bytes,
            )
        compiled = asyncio.wrap_future(self._compiler.prepare(structure))
        try:
            # Shielded: other requests may wait for the same one.
            await asyncio.wait_for(asyncio.shield(compiled), limits.compile_timeout_ms / 1e3)
        except TimeoutError:
            compiled.add_done_callback(lambda future: future.cancelled() or future.exception())
            raise Overloaded(
                f"{field} is not compiled after {limits.compile_timeout_ms} ms",
                field=field,
                limit=limits.compile_timeout_ms,
            ) from None
        except InvalidRequest as error:
            reason = error.details.get("reason")
            raise InvalidRequest(f"{field} cannot be compiled: {reason}", field=field) from None
