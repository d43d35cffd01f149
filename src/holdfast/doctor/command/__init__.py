"""Commands as people write them: shell, manifests, Python calls."""
