"""Structured output: schemas, and what following them costs."""
