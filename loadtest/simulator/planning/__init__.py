"""The planner's policy over a simulated fleet that grows and shrinks, beside a clairvoyant schedule."""
