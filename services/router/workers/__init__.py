"""The router's side of its workers: who they are, their sessions, their loads."""
