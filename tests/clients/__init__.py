"""Clients that people already have, unmodified, against a cluster that `tandem up` started (`make test-clients`)."""
