"""A model's parameters, and how they are read from a checkpoint or drawn at random."""
