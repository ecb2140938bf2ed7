"""A request's states, from admission to its last token."""
