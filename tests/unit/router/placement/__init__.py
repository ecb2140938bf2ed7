"""Placement, driven with plain numbers."""
