"""OpenAI's completions and chat completions: bodies in, answers out."""
