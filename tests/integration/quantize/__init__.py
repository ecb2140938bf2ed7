"""Checkpoints written in fewer bits, read by this project and by transformers."""
