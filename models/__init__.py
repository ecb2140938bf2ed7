"""The demo model (``demo``: finished files) and the recipe that makes it (``recipe``)."""
