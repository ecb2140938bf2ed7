"""`tandem fit`: how many GPUs a load takes, by arithmetic, or by a trace and what a cluster measured."""
