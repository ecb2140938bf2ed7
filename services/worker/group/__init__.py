"""A worker that is a group of processes: the leader starts the followers, watches them, shares its pool with them."""
