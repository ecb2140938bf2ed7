"""How the demo model is made: corpus, tokenizer, chat data, network, training, model card."""
