"""Against a real Kubernetes API server: `make test-k8s`."""
