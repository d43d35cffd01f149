"""Connections, bodies, keys, TLS, errors as HTTP. Knows nothing of models."""
