"""The router's side of its workers: discovery, sessions, reported loads."""
