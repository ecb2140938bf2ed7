"""The text side of a request: prompts to token ids, tokens to text."""
