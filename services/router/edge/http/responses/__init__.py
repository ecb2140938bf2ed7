"""`POST /v1/responses`: OpenAI's responses, as an adapter over the chat request."""
