"""The study of fixed splits beside mode auto."""
