"""What two or more services use: kernels, model, KV blocks, engine, RPC, configuration, errors."""
