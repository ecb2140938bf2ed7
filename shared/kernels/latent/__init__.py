"""Latents on their way into the pool; attention then takes them as keys that are their own values."""
