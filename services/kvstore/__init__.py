"""The KV store service: the fleet's index of sealed blocks in Redis, and the tiers that store blocks."""
