"""A whole cluster on one machine: the index, the KV store, the workers and the router as child processes."""
