"""The cache for clients: a prompt computed ahead of its requests, and a session that is over."""
