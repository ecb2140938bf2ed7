"""Simulates a fleet of workers under the router's real admission and placement: any size, any trace, one process."""
