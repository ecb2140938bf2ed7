"""What fewer bits cost a model in quality, beside the plain model."""
