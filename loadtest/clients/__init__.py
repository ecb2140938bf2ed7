"""Clients of a target: gRPC and OpenAI's HTTP API behind one interface."""
