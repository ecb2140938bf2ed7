"""The router's edge: what clients talk to (OpenAI HTTP, gRPC) and the text side of a request."""
