"""What metrics cost."""
