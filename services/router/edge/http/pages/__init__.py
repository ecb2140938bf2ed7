"""The endpoints beside inference: models, health, status, documentation, the live page."""
