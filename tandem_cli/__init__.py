"""The `tandem` command: start a cluster on this machine, talk to one anywhere."""
