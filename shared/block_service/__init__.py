"""Exchange of KV blocks between workers and store nodes over gRPC: clients, servicer, registry of store nodes."""
