"""The launcher with the real services."""
