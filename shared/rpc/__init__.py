"""gRPC plumbing: generated stubs (`pb`), server start-up, errors on the wire, conversions at the edge."""
