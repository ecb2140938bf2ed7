"""Attention of single-token queries, split over the sequence (flash-decoding)."""
