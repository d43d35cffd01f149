"""The plan that a server of ours starts with."""
