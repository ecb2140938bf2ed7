"""Blocks between workers and store nodes by their gRPC services: clients and servicer."""
