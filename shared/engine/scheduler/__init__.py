"""Which tokens each step computes: pure policy, no tensors."""
