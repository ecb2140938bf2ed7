"""A model as published: its configuration, weights, decoder, tokenizer and chat template."""
