"""The engine's steps beside the limits of the hardware."""
