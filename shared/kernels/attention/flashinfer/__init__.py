"""Paged attention by the library FlashInfer: how its wrappers are told of a step."""
