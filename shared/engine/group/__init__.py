"""The leader's and the followers' side of a group of ranks: plans pass from one to the others."""
