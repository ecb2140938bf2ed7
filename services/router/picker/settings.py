"""Settings of the endpoint picker, a part of the router's."""

from __future__ import annotations

from pydantic import Field

from shared.rpc.tls import Tls
from shared.settings.group import SettingGroup


class PickerSettings(SettingGroup):
    """Settings of the endpoint picker, for gateways that ask by Envoy's ext-proc protocol."""

    bind: str = ""
    """host:port on which gateways ask which router serves a request (Gateway API Inference Extension, ext-proc over
    gRPC); empty = they do not."""
    endpoints: str = ""
    """The HTTP APIs of all routers, host:port, comma-separated. A name stands for all of its addresses, such as that of
    a headless Service, and is resolved again before each probe."""
    max_endpoints: int = Field(default=3, ge=1, le=16)
    """Routers in an answer to a gateway: the first serves, the others are for its retries."""
    tls: Tls = Tls()
    """TLS of the picker. With a ca, gateways need certificates of their own."""
    self_signed: bool = False
    """TLS without `tls`: by a certificate that the router makes when it starts, for gateways that encrypt and do not
    verify."""
