"""What a machine lacks that a component needs, found before anything hangs: `tandem preflight`."""
