"""The families of models: each a file that says how its `config.json` and its tensors' names are to be read."""
