"""The gated delta rule and its short convolution: how layers with a state mix tokens."""
