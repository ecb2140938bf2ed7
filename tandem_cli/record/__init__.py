"""`tandem record`: the requests of a cluster that runs, as a trace."""
