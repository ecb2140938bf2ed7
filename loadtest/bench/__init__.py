"""Benchmarks of the engine, each figure beside the limit measured in the same run."""
