"""A command checked before it is run."""
