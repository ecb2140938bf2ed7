"""Low-rank additions to a decoder's projections, each row of a step its own."""
