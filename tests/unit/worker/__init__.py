"""Policy of the workers."""
