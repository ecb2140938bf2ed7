"""Hand-offs over UCX between two processes: what notes, checks and tags cost."""
