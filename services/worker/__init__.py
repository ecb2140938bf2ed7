"""The worker that the prefill and decode roles share: engine host, sessions, start-up."""
