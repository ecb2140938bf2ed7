"""What `config.json` and the folder of a model say, read once and validated."""
