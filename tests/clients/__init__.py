"""Clients that people already have, unmodified, against a cluster that `tandem serve` started (`make test-clients`)."""
