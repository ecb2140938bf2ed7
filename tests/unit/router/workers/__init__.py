"""Discovery of workers."""
