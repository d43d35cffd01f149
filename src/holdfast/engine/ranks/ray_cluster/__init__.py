"""Ranks on an existing Ray cluster: Ray chooses the nodes and keeps an agent on each; all else is as without it."""
