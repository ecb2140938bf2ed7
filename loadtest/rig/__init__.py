"""What every benchmark shares: its command line, its clusters and processes, turns and statistics, tables and files."""
