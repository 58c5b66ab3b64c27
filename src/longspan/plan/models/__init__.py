"""Models: the shape that a `config.json` describes, families as data, the built-in configs."""
