"""Paged attention by the library FlashInfer: planning its wrappers for a step."""
