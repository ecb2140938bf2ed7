"""Pure policy: how large the pools should be. No Kubernetes, no network; the time is an argument."""
