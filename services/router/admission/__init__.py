"""Who waits, in what order, and who is refused. Pure policy."""
