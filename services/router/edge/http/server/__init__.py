"""The HTTP server: connections, bounds on heads and bodies, one exchange."""
