"""The router's part of a request's trace: which requests are traced, and the spans of a request's states."""
