"""Processes of a real cluster are killed, stopped, hung and drained under streams whose answers are known."""
