"""The transfer plane, between real processes."""
