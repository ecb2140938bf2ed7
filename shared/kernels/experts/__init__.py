"""A layer of experts: which of them a token chooses, and the products of all tokens with their own experts' weights."""
