"""Disaggregated against collocated on one machine: same cores, model, cache, requests and targets."""
