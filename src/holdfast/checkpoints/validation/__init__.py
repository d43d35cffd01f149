"""Whether stored tensors are those that the config describes. Headers only."""
