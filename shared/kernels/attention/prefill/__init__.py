"""Attention of ragged prompt chunks, with online softmax (FlashAttention-2)."""
