"""Tests of the endpoint picker: real ext-proc streams, real router processes."""
