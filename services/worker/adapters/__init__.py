"""A worker's adapters: which it knows, which lie in its slots, and which requests use them."""
