"""Text to token ids and back: tokenizer, detokenizer, chat template."""
