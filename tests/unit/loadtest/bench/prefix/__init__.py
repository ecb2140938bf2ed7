"""The prefix benchmark's own arithmetic."""
