"""GGUF files: read as they are, and shown as model folders."""
