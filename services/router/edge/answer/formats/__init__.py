"""How each family of models writes its tool calls, a file a format."""
