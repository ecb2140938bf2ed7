"""The endpoint picker of the Gateway API Inference Extension: tells a gateway which router serves a request.

Why routers are the endpoints, and why the prompt is not looked at: docs/decisions/operations-and-kubernetes.md, 0100.
"""
