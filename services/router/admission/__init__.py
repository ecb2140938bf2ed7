"""Which requests wait, in what order, and which are refused. Pure policy."""
