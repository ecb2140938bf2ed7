"""A real Envoy in front of routers: static clusters, the ext-proc filter, and the load balancer that obeys the picker.

Envoy is taken from TANDEM_ENVOY, from the PATH, or from where `make k8s-programs` puts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.k8s.programs import Missing, find
from tests.waiting import DEADLINE_S


def _found() -> str | None:
    try:
        return os.environ.get("TANDEM_ENVOY") or str(find("envoy"))
    except Missing:
        return None


ENVOY = _found()
_TYPE = "type.googleapis.com/envoy.extensions"


def bootstrap(port: int, picker: str, routers: Sequence[str], body_mode: str) -> dict[str, Any]:
    """As a gateway's control plane would write it: one listener, the picker, the InferencePool's endpoints."""
    ext_proc = {
        "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "failure_mode_allow": False,
        "message_timeout": "60s",
        # Without it Envoy drops the metadata that a processor sends.
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": body_mode,
            "response_body_mode": "FULL_DUPLEX_STREAMED" if body_mode == "FULL_DUPLEX_STREAMED" else "NONE",
            **({"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"} if "DUPLEX" in body_mode else {}),
        },
    }
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": _ROUTE}]}
            ]
        },
        "http_filters": [
            {"name": "picker", "typed_config": ext_proc},
            {"name": "router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}},
        ],
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": _address(f"127.0.0.1:{port}"),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [_picker_cluster(picker), _pool_cluster(routers)],
        }
    }


_ROUTE = {
    "cluster": "pool",
    "timeout": "0s",
    "retry_policy": {"retry_on": "connect-failure", "num_retries": 2},
}


def _picker_cluster(picker: str) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        **_cluster("picker", [picker]),
        "typed_extension_protocol_options": {
            f"{_TYPE.rpartition('/')[2]}.upstreams.http.v3.HttpProtocolOptions": http2
        },
    }


def _pool_cluster(routers: Sequence[str]) -> dict[str, Any]:
    round_robin = {"@type": f"{_TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"}
    policy = {
        "@type": f"{_TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
        ],
        "fallback_policy": {
            "policies": [{"typed_extension_config": {"name": "round_robin", "typed_config": round_robin}}]
        },
    }
    policies = [{"typed_extension_config": {"name": "override_host", "typed_config": policy}}]
    return {**_cluster("pool", routers), "load_balancing_policy": {"policies": policies}}


def _cluster(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@contextlib.asynccontextmanager
async def envoy(
    folder: Path, port: int, picker: str, routers: Sequence[str], body_mode: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of Envoy, once that serves."""
    assert ENVOY is not None
    config = folder / f"envoy-{body_mode.lower()}.yaml"
    config.write_text(yaml.safe_dump(bootstrap(port, picker, routers, body_mode)))
    with (folder / "envoy.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            ENVOY, "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1", stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    assert process.returncode is None, (folder / "envoy.log").read_text()[-3000:]
                    with contextlib.suppress(httpx.TransportError):
                        await client.get("/healthz")
                        break
                    await asyncio.sleep(0.05)
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
