"""What prefill and decode workers are made of: engine host, sessions, start-up. The two roles build on it."""
