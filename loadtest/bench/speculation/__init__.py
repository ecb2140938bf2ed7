"""`python -m loadtest.bench speculation`: guesses of the next tokens."""
