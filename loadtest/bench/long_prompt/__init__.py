"""What arriving long prompts do to running answers."""
