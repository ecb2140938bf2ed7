"""Hostile and random input against the router's edge and the messages between services."""
