"""Two preflights measure what passes between them: one serves, the other connects to it."""
