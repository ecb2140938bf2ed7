"""One rank's part of a model: heads, columns, experts, rows of the vocabulary."""
