"""A model folder from one worker to another."""
