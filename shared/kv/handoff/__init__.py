"""Moving a request's blocks from a sender to a receiver: both sides of one protocol."""
