"""What the text of an answer means: reasoning, tool calls, and what is left. Pure: characters in, events out."""
