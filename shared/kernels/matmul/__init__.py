"""A linear layer's product in one order of sums, whatever the number of rows."""
