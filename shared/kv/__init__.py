"""KV blocks: how they are named, laid out, pooled, checked and moved between workers."""
