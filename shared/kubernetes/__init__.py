"""The Kubernetes API as Tandem's services use it. Imported where a setting asks for it alone: the client is large."""
