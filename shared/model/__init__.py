"""A published model: its configuration, weights, decoder, tokenizer and chat template."""
