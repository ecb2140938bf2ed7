"""How the ranks of a worker's group add up tensors and pass messages."""
