"""The long-prompt benchmark."""
