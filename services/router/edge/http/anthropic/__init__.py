"""`POST /v1/messages`: Anthropic's messages, as an adapter over the chat request."""
