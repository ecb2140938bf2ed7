"""The configuration in `config.json` and in the folder of a model, read once and validated."""
