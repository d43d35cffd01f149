"""A running server, and this machine."""
