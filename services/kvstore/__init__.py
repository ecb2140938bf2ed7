"""The fleet's index of sealed blocks in Redis, behind gRPC."""
