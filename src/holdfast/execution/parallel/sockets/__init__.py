"""Ranks that share no memory: which machine each is on, and how numbers go between them by sockets."""
