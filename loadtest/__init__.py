"""Load tests that report goodput: workload → client → goodput → report. `python -m loadtest --help`."""
