"""The endpoint picker of the Gateway API Inference Extension: chooses the router that a gateway sends a request to.

Why routers are the endpoints, and why the prompt is not looked at: docs/decisions/operations-and-kubernetes.md, 0100.
"""
