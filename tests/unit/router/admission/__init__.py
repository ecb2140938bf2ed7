"""The admission queue, driven with plain numbers."""
