"""Which cores of a machine compute, and for which worker: what Linux says of it, and pure policy over that."""
