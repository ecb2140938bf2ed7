"""All benchmarks. Figures come with a limit or a peer's figure measured in the same run."""
