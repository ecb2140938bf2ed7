"""Makes the client for a target's scheme."""

from __future__ import annotations

from loadtest.clients.base import Client
from loadtest.clients.http_client import HttpClient
from loadtest.clients.target import Target


def make_client(target: Target, model: str = "", api_key: str = "") -> Client:
    """A client that has not been started."""
    if target.scheme == "grpc":
        # Imported here: gRPC takes longer to load than everything else together.
        from loadtest.clients.grpc_client import GrpcClient

        return GrpcClient(target, model, api_key)
    return HttpClient(target, model, api_key)
