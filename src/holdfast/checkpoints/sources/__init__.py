"""Where a model's files come from: a path, a built-in name, the hub."""
